"""Replay against bare SimPy in the same run, in CPU seconds of one core."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import bare_simpy
from moesim.runs.replay import replay
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"
SHIPPED = (
    Path(__file__).resolve().parents[1] / "traces" / "data" / "tiny_evaluation.parquet"
)
MODELS = {
    "gpt_oss_20b": "gpt-oss-20b",
    "kimi_linear_48b_a3b_decode300": "kimi-linear-48b-a3b",
    "olmoe_1b_7b_decode299": "olmoe-1b-7b",
    "qwen3_30b_a3b_top6": "qwen3-30b-a3b",
}
"""Files of `SHARED`, and whose routing they hold."""
ROUNDS = 5


def bench_trace(folder: Path) -> Trace:
    """The 48-layer Qwen3 trace where it lies beside the checkout, else the shipped
    one.
    """
    source = SHARED / "qwen3_30b_a3b_top6.parquet"
    if not source.is_file():
        return open_trace(SHIPPED)
    import_trace(source, folder / "q.parquet", shape=model_shape("qwen3-30b-a3b"))
    return open_trace(folder / "q.parquet")


def report() -> None:
    """Print layer steps per second and ratios, median of several rounds."""
    with tempfile.TemporaryDirectory() as name:
        trace = bench_trace(Path(name))
        print(
            f"replay of {trace.path.name} ({trace.shape.layers} layers), timeline and"
            " metrics included"
        )
        for policy in ("greedy", "on-demand", "all-cpu"):
            spent = []
            timeouts = []
            lanes = []
            rates = []
            for round_ in range(ROUNDS + 1):
                gc.collect()
                begin_s = time.process_time()
                run = replay(
                    trace,
                    policy,
                    cache="lru",
                    hw="rtx3090-epyc7532",
                    cache_ratio=0.25,
                )
                seconds = time.process_time() - begin_s
                if not round_:
                    continue  # first: compiled kernels are loaded
                spent.append(seconds)
                rates.append(run.metrics["layer_steps"] / seconds)
                timeouts.append(bare_simpy.timeouts_s(run.metrics["events"]))
                lanes.append(bare_simpy.resources_s(run.metrics["events"]))
            events = run.metrics["events"] / run.metrics["layer_steps"]
            print(
                f"  {policy:9}{statistics.median(rates):7,.0f} layer steps/s (target"
                f" 10,000), {events:.1f} events each; time / bare SimPy:"
                f" {_ratio(spent, timeouts):.2f} of timeouts alone (target 3),"
                f" {_ratio(spent, lanes):.2f} of processes holding resources"
            )


def _ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the ratios round by round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))

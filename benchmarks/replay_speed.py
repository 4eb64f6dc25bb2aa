"""Replay against bare SimPy, and the fast engine against SimPy, in the same run:
CPU seconds of one core.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks import bare_simpy
from moesim.policies.cache._learned_network import sizes as network_sizes
from moesim.runs.config import RunConfig
from moesim.runs.replay import replay, simulated
from moesim.runs.setup import Setup
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.synthetic.predict import predict
from moesim.traces.timeline.spans import Timeline

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
OF_SYSTEMS = {
    "dali": 150_000,
    "hybrimoe": 150_000,
    "daop": 150_000,
    "smoe": 150_000,
    "flashmoe": 150_000,
    "dfa-cache": 150_000,
    "llama.cpp": 150_000,
    "hybrimoe-released": 100_000,
    "krasis": 100_000,
    "edgemoe": 100_000,
    "moe-lightning": 100_000,
    "fate": 100_000,
    "moe-infinity": 50_000,
    "finemoe": 50_000,
    "sp-moe": 50_000,
}
"""Systems that are timed, and the least layer steps per second of each."""

SIMPY_STEPS = 200
"""Forward passes of a system in SimPy, which takes a hundred times as long."""

ROUNDS = 5
MACHINE = "rtx3090-epyc7532"


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
                    hw=MACHINE,
                    engine="simpy",
                    cache_ratio=0.25,
                )
                seconds = time.process_time() - begin_s
                if not round_:
                    continue  # first: modules are loaded
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

        _report_fast(trace)
        _report_rows(Path(name))


def _report_fast(trace: Trace) -> None:
    """Print the fast engine's layer steps per second, and SimPy's beside them.

    Least CPU seconds of several turns, in which both engines follow each other.
    """
    print("fast engine, greedy with LRU, against SimPy in the same run")
    for label, kept, target in (
        ("loop, no timeline", None, 500_000),
        ("metrics, no timeline", False, 500_000),
        ("metrics and timeline", True, 300_000),
    ):
        least = {}
        for engine in ("fast", "simpy"):
            turns = [_turn(trace, engine, kept) for _ in range(ROUNDS + 1)]
            least[engine] = min(seconds / count for seconds, count in turns[1:])
        rate = 1.0 / least["fast"]
        times = least["simpy"] / least["fast"]
        print(
            f"  {label:22}{rate:9,.0f} layer steps/s (target {target:,}),"
            f" {times:.1f} times SimPy's {1.0 / least['simpy']:,.0f}"
        )


def _report_rows(folder: Path) -> None:
    """Print how long the largest shared trace takes, and what that is per access."""
    source = SHARED / "gpt_oss_20b.parquet"
    if not source.is_file():
        print("fast engine, gpt_oss_20b: ../shared/traces is not here")
        return
    path = folder / "g.parquet"
    import_trace(source, path, shape=model_shape(MODELS[source.stem]))
    trace = open_trace(path)
    for label, kept, target in (
        ("loop, no timeline", None, 1.5),
        ("metrics, no timeline", False, 1.5),
        ("metrics and timeline", True, 1.5),
    ):
        turns = [_turn(trace, "fast", kept) for _ in range(3)]
        seconds, count = min(turns)
        print(
            f"  {source.stem}, {label}: {trace.rows:,} rows in {seconds:.2f} s (target"
            f" {target:.1f}), {count / seconds:,.0f} layer steps/s"
        )
    _report_systems(trace, folder)


def _report_systems(trace: Trace, folder: Path) -> None:
    """Print layer steps per CPU second of systems with metrics, and SimPy's beside."""
    print(f"systems on {trace.rows:,} rows with drawn predictions, metrics")
    path = folder / "predicted.parquet"
    predict(
        trace,
        path,
        recall=(0.82, 0.75, 0.7),
        residual=0.86,
        at=1,
        scores=True,
    )
    predicted = open_trace(path)
    shape = trace.shape
    draw = np.random.default_rng(0).normal
    network = {
        name: draw(size=size).astype(np.float32)
        for name, size in network_sizes(shape.layers, shape.experts, 64).items()
    }
    artefacts = folder / "flashmoe.safetensors"
    save_file(network, artefacts)
    for system, target in OF_SYSTEMS.items():
        rates = {}
        for engine, steps in (("fast", None), ("simpy", SIMPY_STEPS)):
            least_s = math.inf
            for _ in range(2):
                gc.collect()
                begin_s = time.process_time()
                run = replay(
                    predicted,
                    system,
                    hw=MACHINE,
                    engine=engine,
                    keep=False,
                    steps=steps,
                    artefacts=artefacts if system == "flashmoe" else None,
                )
                least_s = min(least_s, time.process_time() - begin_s)
            rates[engine] = run.metrics["layer_steps"] / least_s
        times = rates["fast"] / rates["simpy"]
        print(
            f"  {system:20}{rates['fast']:9,.0f} layer steps/s (target"
            f" {target:,}), {times:.0f} times SimPy's {rates['simpy']:,.0f}",
            flush=True,
        )


def _turn(trace: Trace, engine: str, kept: bool | None) -> tuple[float, int]:
    """CPU seconds and layer steps of one replay; `kept` None leaves out all figures."""
    gc.collect()
    if kept is not None:
        begin_s = time.process_time()
        run = replay(trace, "greedy", cache="lru", hw=MACHINE, engine=engine, keep=kept)
        seconds = time.process_time() - begin_s
        return seconds, run.metrics["layer_steps"]
    config = RunConfig.of(trace, "greedy", cache="lru", hw=MACHINE, engine=engine)
    setup = Setup.of(config, trace)
    planner = setup.planner()
    timeline = Timeline(setup.profile.lanes, sink=lambda *_: None)
    begin_s = time.process_time()
    result, _ = simulated(setup, trace, planner, timeline)
    return time.process_time() - begin_s, result.layer_steps


def _ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the ratios round by round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))

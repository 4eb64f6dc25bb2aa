"""Dense parts one by one, really run and simulated; and attention over keys that query
heads share, each head for itself and as rows of one product.

    python -m benchmarks.dense_parts hw.toml

Every line is one kind of dense part: the head of a forward pass, its first layer, its
other layers. Keep the machine quiet: it measures seconds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from moesim.evidence.validation.paired_runs import Trial, TrialRunner, simulate
from moesim.hwprofiles.profile import load_profile
from moesim.runs.config import MemoryOptions
from moesim.runs.machine import experts_dtype
from moesim.runtime.executor.trace_driven import shape_for
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import open_trace
from moesim.traces.shipped import resolve_trace
from moesim.traces.timeline.spans import DENSE

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Timeline

SHAPES = ("olmoe-1b-7b/4", "qwen3-30b-a3b/8")
BATCHES = (1, 4)
STEPS = 8
RUNS = 5
_CALLS = 100
_CONTEXT, _WIDTH = 100, 128


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dense_parts",
        description="Compare dense parts of real runs with simulated ones.",
    )
    parser.add_argument("profile", type=Path, metavar="HW", help="of this machine")
    profile = load_profile(parser.parse_args().profile)
    for spec in SHAPES:
        shape = shape_for(_trace().shape, spec, experts_dtype(profile))
        for batch in BATCHES:
            _compare(shape, batch, profile)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for heads, kept_heads in ((16, 16), (32, 4)):
        for batch in BATCHES:
            _attend(heads, kept_heads, batch)


def _trace() -> Trace:
    return open_trace(resolve_trace("tiny"))


def _compare(shape: ModelShape, batch: int, profile: HardwareProfile) -> None:
    """Print measured and simulated milliseconds of one setting's last forward pass."""
    steps = list(compose(_trace(), batch=batch, steps=STEPS))
    trial = Trial("all-cpu+none", MemoryOptions(cache_ratio=0.4), steps)
    with tempfile.TemporaryDirectory() as folder:
        dtype = experts_dtype(profile)
        with TrialRunner(shape, profile, dtype=dtype, store=Path(folder)) as runner:
            # The first run meets memory that was never written.
            runner.run(trial, profile)
            runs = [_last_pass_ms(runner.run(trial, profile)) for _ in range(RUNS)]
    simulated = _last_pass_ms(simulate(trial, shape, profile))
    for part, expected_ms in simulated.items():
        measured_ms = np.median([run[part] for run in runs])
        print(
            f"{shape.name}, batch {batch}, context {steps[-1].context_tokens}, {part}:"
            f" measured {measured_ms:.2f} ms, simulated {expected_ms:.2f} ms"
        )


def _last_pass_ms(timeline: Timeline) -> dict[str, float]:
    seconds: dict[str, list[float]] = {"head": [], "first layer": [], "layers": []}
    for spans in timeline.chunks():
        chosen = (spans["kind"] == DENSE) & (spans["step"] == STEPS - 1)
        lengths = (spans["end_s"] - spans["start_s"])[chosen]
        for layer, length in zip(spans["layer"][chosen], lengths, strict=True):
            part = "head" if layer < 0 else "layers" if layer else "first layer"
            seconds[part].append(length)
    return {part: 1e3 * float(np.mean(each)) for part, each in seconds.items()}


def _attend(heads: int, kept_heads: int, batch: int) -> None:
    """Print milliseconds of one decoded token's attention, both ways."""
    shape = (batch, kept_heads, _CONTEXT, _WIDTH)
    keys, values = (torch.randn(shape).to(torch.bfloat16) for _ in range(2))
    queries = torch.randn(batch, heads, 1, _WIDTH).to(torch.bfloat16)
    rows = queries.reshape(batch, kept_heads, -1, _WIDTH)
    attend = functional.scaled_dot_product_attention
    by_head_ms = _median_ms(
        lambda: attend(queries, keys, values, enable_gqa=heads != kept_heads)
    )
    together_ms = _median_ms(lambda: attend(rows, keys, values))
    read_bytes = 2 * keys.numel() * keys.itemsize
    print(
        f"attention, {heads} heads on {kept_heads}, batch {batch}, context {_CONTEXT}:"
        f" each head {by_head_ms:.3f} ms, as rows {together_ms:.3f} ms"
        f" ({1e-6 * read_bytes / together_ms:.1f} GB/s)"
    )


def _median_ms(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_CALLS):
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return 1e3 * float(np.median(seconds))


if __name__ == "__main__":
    main()

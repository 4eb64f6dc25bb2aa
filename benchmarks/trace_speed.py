"""What a trace's own statistics cost: rows and accesses per second of CPU time, and memory at ten million rows."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from traces.curves import CurveFold
from traces.layer_steps import layer_steps
from traces.reader import Trace, open_trace
from traces.schema import ModelShape, Phase, TraceHeader
from traces.similarity import Resemblance
from traces.stats import stats
from traces.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable

MILLION, ROWS = 1e6, 10_000_000
SHAPE = ModelShape("bench", 24, 64, 8, 2048, 1024, (3 << 20,) * 24, 0)
SEQUENCE_TOKENS = 1000
_SURVEY = """
import resource, sys, time
from traces.reader import open_trace
from traces.survey import survey
begin_s = time.process_time()
trace = open_trace(sys.argv[1])
survey(trace)
peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"{trace.rows / (time.process_time() - begin_s) / 1e6:.2f} {peak_mib:.0f}")
"""


def report(rows: int = ROWS) -> None:
    """Print the rates at a tenth of `rows`, and the whole survey's rate and peak memory at `rows`."""
    with tempfile.TemporaryDirectory() as name:
        small = open_trace(write(Path(name) / "small.parquet", rows // 10))
        print(f"statistics of a synthetic trace, {SHAPE.layers} x {SHAPE.experts} top {SHAPE.top_k}; per CPU second")
        reading = _seconds(lambda: deque(small.sequences(), maxlen=0))
        print(f"  reading alone       {small.rows / reading / MILLION:6.2f} million rows")
        print(f"  stats               {small.rows / _seconds(lambda: stats(small)) / MILLION:6.2f} million rows")
        print(f"  similarity and so on {small.rows / _seconds(lambda: _alike(small)) / MILLION:5.2f} million rows")
        print(f"  all three curves    {_curve_rate(small):6.2f} million accesses (target 1), from memory")
        large = write(Path(name) / "large.parquet", rows)
        done = subprocess.run([sys.executable, "-c", _SURVEY, large], capture_output=True, text=True, check=True)
        rate, peak = done.stdout.split()
        print(f"  survey of {rows:,} rows, curves included: {rate} million rows, peak {peak} MiB")


def _curve_rate(trace: Trace) -> float:
    """Million accesses per CPU second, through layer steps that lie ready."""
    blocks = list(layer_steps(trace))

    def fold() -> None:
        curve = CurveFold(trace.shape)
        for block in blocks:
            curve.add(block)
        curve.end()

    return sum(len(block.experts) for block in blocks) / _seconds(fold) / MILLION


def _alike(trace: Trace) -> None:
    fold = Resemblance(trace.shape)
    for rows in trace.sequences():
        fold.add(rows)


def _seconds(work: Callable[[], object]) -> float:
    """CPU seconds, the middle of three."""
    taken = []
    for _ in range(3):
        begin_s = time.process_time()
        work()
        taken.append(time.process_time() - begin_s)
    return float(np.median(taken))


def write(path: Path, rows: int) -> Path:
    """Sequences of decode tokens; each layer has its favourites, drawn without replacement (Gumbel's trick)."""
    rng = np.random.default_rng(0)
    layers, experts, top_k = SHAPE.layers, SHAPE.experts, SHAPE.top_k
    taste = rng.normal(size=(layers, experts)).astype(np.float32)
    count = SEQUENCE_TOKENS * layers
    noise = rng.gumbel(size=(4 * SEQUENCE_TOKENS, layers, experts)).astype(np.float32)  # drawn once: 25 MiB
    pool = np.argpartition(-(noise + taste), top_k, axis=2)[:, :, :top_k].astype(np.uint16)
    pos, layer = np.repeat(np.arange(SEQUENCE_TOKENS), layers), np.tile(np.arange(layers), SEQUENCE_TOKENS)
    with TraceWriter(path, TraceHeader(SHAPE, {"tool": "bench"})) as writer:
        for seq in range(-(-rows // count)):
            routing = pool[rng.integers(0, len(pool), SEQUENCE_TOKENS)].reshape(-1, top_k)
            writer.write(seq, pos, Phase.DECODE, layer, routing)
    return path


if __name__ == "__main__":
    report(int(float(sys.argv[1])) if len(sys.argv) > 1 else ROWS)

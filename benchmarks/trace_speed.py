"""What large traces cost: rows and accesses per second of CPU time, and the peak memory of import, sort and replay.

``python -m benchmarks.trace_speed 1e8`` needs some GB of disk and half an hour.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from traces.arrow import lists, named, numbers
from traces.curves import CurveFold
from traces.layer_steps import layer_steps
from traces.reader import Trace, open_trace
from traces.schema import ModelShape, Phase, TraceHeader
from traces.similarity import Resemblance
from traces.stats import stats
from traces.writer import ROW_GROUP_ROWS, TraceWriter, arrow_schema

if TYPE_CHECKING:
    from collections.abc import Callable

MILLION, ROWS = 1e6, 10_000_000
SHAPE = ModelShape("bench", 24, 64, 8, 2048, 1024, (3 << 20,) * 24, 0)
SEQUENCE_TOKENS = 1000
_CHILD = """
import sys, time
{imports}
begin_s = time.process_time()
rows = {work}
with open("/proc/self/status") as status:  # ru_maxrss would inherit the parent's peak
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(rows / (time.process_time() - begin_s) / 1e6, peak_kib / 1024)
"""
_LARGE = {
    "import, rows shuffled": (
        "from traces.importers import import_trace",
        "import_trace(sys.argv[1], sys.argv[2]).rows",
    ),
    "survey, all curves": (
        "from traces.reader import open_trace; from traces.survey import survey",
        "(trace := open_trace(sys.argv[2]), survey(trace))[0].rows",
    ),
    "replay, LRU alone": (
        "from moesim.api import replay_cache; from traces.reader import open_trace",
        "(trace := open_trace(sys.argv[2]), replay_cache(trace, 'lru'))[0].rows",
    ),
}


def report(rows: int = ROWS) -> None:
    """Print the rates at a tenth of `rows`, and the whole survey's rate and peak memory at `rows`."""
    with tempfile.TemporaryDirectory() as name:
        small = open_trace(write(Path(name) / "small.parquet", rows // 10))
        print(f"statistics of a synthetic trace, {SHAPE.layers} x {SHAPE.experts} top {SHAPE.top_k}; per CPU second")
        reading = _seconds(lambda: deque(small.sequences(), maxlen=0))
        print(f"  reading alone       {small.rows / reading / MILLION:6.2f} million rows")
        print(f"  stats               {small.rows / _seconds(lambda: stats(small)) / MILLION:6.2f} million rows")
        print(f"  similarity and so on {small.rows / _seconds(lambda: _alike(small)) / MILLION:5.2f} million rows")
        print(f"  all four curves     {_curve_rate(small):6.2f} million accesses (target 1), from memory")
        print(f"{rows:,} rows, each in a process of its own (target: 1 GB)")
        shuffled, large = Path(name) / "shuffled.parquet", Path(name) / "large.parquet"
        write_shuffled(shuffled, rows)
        for what, (imports, work) in _LARGE.items():
            code = _CHILD.format(imports=imports, work=work)
            call = [sys.executable, "-c", code, str(shuffled), str(large)]
            rate, peak = subprocess.run(call, capture_output=True, text=True, check=True).stdout.split()
            print(f"  {what:<22} {float(rate):5.2f} million rows per CPU second, peak {float(peak):4.0f} MiB")


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


def write_shuffled(path: Path, rows: int) -> Path:
    """Our layout with its rows far from their neighbours: row i stands where ``i * step`` modulo their number says."""
    rng = np.random.default_rng(0)
    layers, experts, top_k = SHAPE.layers, SHAPE.experts, SHAPE.top_k
    per_sequence = SEQUENCE_TOKENS * layers
    rows = -(-rows // per_sequence) * per_sequence
    pool = np.argsort(rng.random((4 * per_sequence, experts)), axis=1)[:, :top_k].astype(np.uint16)
    step = round(rows * 0.618)
    while np.gcd(step, rows) != 1:
        step += 1
    header = TraceHeader(SHAPE, {"tool": "bench"})
    schema = arrow_schema(header, ())
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=["phase", "layer"]) as writer:
        for start in range(0, rows, ROW_GROUP_ROWS):
            place = np.arange(start, min(start + ROW_GROUP_ROWS, rows)) * step % rows
            seq, rest = np.divmod(place, per_sequence)
            pos, layer = np.divmod(rest, layers)
            phase = named(np.full(len(place), Phase.DECODE, np.int8), [phase.label for phase in Phase])
            keys = [
                numbers(seq.astype(np.int32)),
                numbers(pos.astype(np.int32)),
                phase,
                numbers(layer.astype(np.int16)),
            ]
            routing = lists(pool[place * 2_654_435_761 % (1 << 32) % len(pool)])
            writer.write_batch(pa.RecordBatch.from_arrays([*keys, routing], schema=schema))
    return path


if __name__ == "__main__":
    report(int(float(sys.argv[1])) if len(sys.argv) > 1 else ROWS)

"""What large traces cost: rows and accesses per second of CPU time, and the peak memory
of import, sort and replay.

``python -m benchmarks.trace_speed 1e8`` needs some GB of disk and a quarter of an hour;
``--folder KEPT --part import`` and so on does the same bit by bit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.cpu_seconds import cpu_seconds
from moesim.traces.format.layer_steps import joined, layer_steps, of_sequences
from moesim.traces.format.parquet import lists, named, numbers
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.format.schema import ModelShape, Phase, TraceHeader
from moesim.traces.format.writer import ROW_GROUP_ROWS, TraceWriter, arrow_schema
from moesim.traces.stats.hit_rate_curves import CURVES, curves
from moesim.traces.stats.statistics import LayerAggregator, SimilarityAggregator
from moesim.traces.stats.trace_summary import summarise_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moesim.traces.format.batch import LayerSteps
    from moesim.traces.format.reader import SequenceRows

MILLION = 1e6
ROWS = 10_000_000
SHAPE = ModelShape("bench", 24, 64, 8, 2048, 1024, (3 << 20,) * 24, 0)
SEQUENCE_TOKENS = 1000
_CHILD = """
import sys, time
{imports}
begin_s = time.process_time()
rows = {work}
taken_s = time.process_time() - begin_s
with open("/proc/self/status") as status:  # ru_maxrss would inherit the parent's peak
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(rows, taken_s, peak_kib / 1024)
"""
# Part -> what it is, what it imports, and an expression that does it and is worth the
# rows of the trace.
LARGE = {
    "import": (
        "rows shuffled",
        "from moesim.traces.importers import import_trace",
        "import_trace(sys.argv[1], sys.argv[2]).rows",
    ),
    "survey": (
        "with all curves",
        (
            "from moesim.traces.format.reader import open_trace; from"
            " moesim.traces.stats.trace_summary import summarise_trace"
        ),
        "(trace := open_trace(sys.argv[2]), summarise_trace(trace))[0].rows",
    ),
    "cache": (
        "LRU alone",
        (
            "from moesim.runs.replay import replay_cache; from"
            " moesim.traces.format.reader import open_trace"
        ),
        "(trace := open_trace(sys.argv[2]), replay_cache(trace, 'lru'))[0].rows",
    ),
    "replay": (
        "timed, batches of 256",
        (
            "from moesim.runs.replay import replay; from moesim.traces.format.reader"
            " import open_trace"
        ),
        (
            "(trace := open_trace(sys.argv[2]), replay(trace, 'greedy', cache='lru',"
            " hw='rtx4060ti', batch=256, cache_ratio=0.25,"
            " out=sys.argv[3]))[0].rows"
        ),
    ),
    "single": (
        "timed, one by one",
        (
            "from moesim.runs.replay import replay; from moesim.traces.format.reader"
            " import open_trace"
        ),
        (
            "(trace := open_trace(sys.argv[2]), replay(trace, 'greedy', cache='lru',"
            " hw='rtx4060ti', cache_ratio=0.25, keep=False))[0].rows"
        ),
    ),
}


def report(
    rows: int = ROWS, parts: Sequence[str] = (), folder: Path | None = None
) -> None:
    """Print the rates at a tenth of `rows`, and the rate and peak memory of each part
    of `LARGE` at `rows`.

    Args:
        rows: of the large trace.
        parts: which parts; none for all.
        folder: where the traces are kept for another call; None throws them away.
    """
    with tempfile.TemporaryDirectory() as name:
        place = folder or Path(name)
        place.mkdir(parents=True, exist_ok=True)
        if not parts:
            _rates(open_trace(write(Path(name) / "small.parquet", rows // 10)))
        print(f"{rows:,} rows, each in a process of its own (target: 1 GB)", flush=True)
        shuffled = place / f"shuffled-{rows}.parquet"
        large = place / f"large-{rows}.parquet"
        for part in parts or LARGE:
            if part == "import" and not shuffled.exists():
                write_shuffled(shuffled, rows)
            elif part != "import" and not large.exists():
                sys.exit(f"no {large}: run the part 'import' with this --folder first")
            _report_large(part, shuffled, large, Path(name) / "run")


def _report_large(part: str, shuffled: Path, large: Path, out: Path) -> None:
    """Run one part of `LARGE` in a process of its own."""
    description, imports, work = LARGE[part]
    code = _CHILD.format(imports=imports, work=work)
    done = subprocess.run(
        [sys.executable, "-c", code, str(shuffled), str(large), str(out)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows, taken_s, peak_mib = map(float, done.stdout.split())
    rate = rows / taken_s / MILLION
    print(
        f"  {f'{part}, {description}':<29} {rate:5.2f} million rows per CPU second,"
        f" {taken_s:4.0f} s, peak {peak_mib:4.0f} MiB",
        flush=True,
    )


def _rates(small: Trace) -> None:
    print(
        f"statistics of a synthetic trace, {SHAPE.layers} x {SHAPE.experts} top"
        f" {SHAPE.top_k}; per CPU second"
    )
    _print_rows(small, "reading alone", lambda: deque(small.sequences(), maxlen=0))
    _print_rows(small, "stats", lambda: summarise_trace(small))
    _print_rows(small, "similarity and so on", lambda: _similarity(small))
    _print_rows(small, "all but the curves", lambda: _without_curves(small))

    blocks = list(layer_steps(small))
    accesses = sum(len(block.experts) for block in blocks)
    for names in (("lru",), ("belady",), ("lru_global",), ("belady_global",), CURVES):
        seconds = cpu_seconds(lambda names=names: _curves(small, blocks, names))
        label = "all four curves" if names == CURVES else names[0].replace("_", " ")
        print(
            f"  {label:<20} {accesses / seconds / MILLION:6.2f} million accesses"
            " (target 1), from memory"
        )


def _print_rows(trace: Trace, label: str, work: Callable[[], object]) -> None:
    rate = trace.rows / cpu_seconds(work) / MILLION
    print(f"  {label:<20} {rate:6.2f} million rows")


def _curves(trace: Trace, blocks: list[LayerSteps], names: tuple[str, ...]) -> None:
    """Some curves of layer steps that lie ready."""
    curves(blocks, trace.shape, names)


def _without_curves(trace: Trace) -> None:
    layers = LayerAggregator(trace.shape)
    similarity = SimilarityAggregator(trace.shape)

    def read() -> Iterator[SequenceRows]:
        for rows in trace.sequences():
            similarity.add(rows)
            yield rows

    for block in joined(of_sequences(read(), trace.shape)):
        layers.add(block)


def _similarity(trace: Trace) -> None:
    aggregator = SimilarityAggregator(trace.shape)
    for rows in trace.sequences():
        aggregator.add(rows)


def write(path: Path, rows: int) -> Path:
    """Write sequences of decode tokens; each layer has favourites, drawn without
    replacement (Gumbel's trick).
    """
    rng = np.random.default_rng(0)
    layers = SHAPE.layers
    experts = SHAPE.experts
    top_k = SHAPE.top_k
    preference = rng.normal(size=(layers, experts)).astype(np.float32)
    count = SEQUENCE_TOKENS * layers
    # Drawn once: 25 MiB.
    noise = rng.gumbel(size=(4 * SEQUENCE_TOKENS, layers, experts)).astype(np.float32)
    pool = np.argpartition(-(noise + preference), top_k, axis=2)[:, :, :top_k].astype(
        np.uint16
    )
    pos = np.repeat(np.arange(SEQUENCE_TOKENS), layers)
    layer = np.tile(np.arange(layers), SEQUENCE_TOKENS)
    with TraceWriter(path, TraceHeader(SHAPE, {"tool": "bench"})) as writer:
        for seq in range(-(-rows // count)):
            routing = pool[rng.integers(0, len(pool), SEQUENCE_TOKENS)].reshape(
                -1, top_k
            )
            writer.write(seq, pos, Phase.DECODE, layer, routing)
    return path


def write_shuffled(path: Path, rows: int) -> Path:
    """Write our layout with its rows far from their neighbours: row i stands at place
    ``i * step`` modulo their number.
    """
    rng = np.random.default_rng(0)
    layers = SHAPE.layers
    experts = SHAPE.experts
    top_k = SHAPE.top_k
    per_sequence = SEQUENCE_TOKENS * layers
    rows = -(-rows // per_sequence) * per_sequence
    pool = np.argsort(rng.random((4 * per_sequence, experts)), axis=1)[
        :, :top_k
    ].astype(np.uint16)
    step = round(rows * 0.618)
    while np.gcd(step, rows) != 1:
        step += 1
    header = TraceHeader(SHAPE, {"tool": "bench"})
    schema = arrow_schema(header, ())
    with pq.ParquetWriter(
        path, schema, compression="zstd", use_dictionary=["phase", "layer"]
    ) as writer:
        for start in range(0, rows, ROW_GROUP_ROWS):
            place = np.arange(start, min(start + ROW_GROUP_ROWS, rows)) * step % rows
            seq, rest = np.divmod(place, per_sequence)
            pos, layer = np.divmod(rest, layers)
            phase = named(
                np.full(len(place), Phase.DECODE, np.int8),
                [phase.label for phase in Phase],
            )
            keys = [
                numbers(seq.astype(np.int32)),
                numbers(pos.astype(np.int32)),
                phase,
                numbers(layer.astype(np.int16)),
            ]
            routing = lists(pool[place * 2_654_435_761 % (1 << 32) % len(pool)])
            writer.write_batch(
                pa.RecordBatch.from_arrays([*keys, routing], schema=schema)
            )
    return path


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "rows", nargs="?", type=lambda text: int(float(text)), default=ROWS
    )
    options.add_argument("--part", action="append", choices=LARGE, default=[])
    options.add_argument("--folder", type=Path)
    chosen = options.parse_args()
    report(chosen.rows, chosen.part, chosen.folder)

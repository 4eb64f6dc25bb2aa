"""Hits of fixed sets of experts beside LRU's, on recorded routing: ``python -m
benchmarks.hot_sets``.

Each trace is cut in two. One part is the calibration, whose most used experts fill the
caches; the other is judged; then they change places. Single sequences are halved, of
several every other one is taken.
"""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.replay_speed import SHARED
from moesim.runs.replay import replay_cache
from moesim.traces.format.reader import SequenceRows, Trace, open_trace
from moesim.traces.format.schema import Phase
from moesim.traces.format.writer import TraceWriter
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape

TRACES = {
    "qwen3-30b-a3b": "qwen3_30b_a3b_top6",
    "gpt-oss-20b": "gpt_oss_20b",
    "olmoe-1b-7b": "olmoe_1b_7b_decode299",
    "kimi-linear-48b-a3b": "kimi_linear_48b_a3b_decode300",
    "qwen3.6-35b-a3b": "qwen36_35b_a3b_coding_prefill28_decode192",
    "qwen3.8-flash-next": "qwen38_flash_next_chat_decode67",
}
CACHES = ("lru", "static")
RATIOS = (0.1, 0.2, 0.3, 0.5, 0.75)
MOST_SEQUENCES = 16
MOST_TOKENS = 150


def write_generated(
    writer: TraceWriter,
    number: int,
    rows: SequenceRows,
    first: int = 0,
    end: int | None = None,
) -> None:
    """Write a sequence's generated tokens, or those from `first` up to `end`."""
    generated = np.flatnonzero(rows.phase == Phase.DECODE)
    place = rows.pos[generated] - rows.pos[generated].min()
    mine = generated[(place >= first) & (place < (end or place.max() + 1))]
    pos = rows.pos[mine] - rows.pos[mine].min()
    writer.write(number, pos, rows.phase[mine], rows.layer[mine], rows.experts[mine])


def halves(trace: Trace, folder: Path) -> tuple[Path, Path]:
    """Write the generated tokens of a trace in two parts."""
    sequences = list(islice(trace.sequences(), 2 * MOST_SEQUENCES))
    parts = []
    for part in range(2):
        path = folder / f"{trace.path.stem}_{part}.parquet"
        with TraceWriter(path, trace.header) as writer:
            if len(sequences) > 1:
                for number, rows in enumerate(sequences[part::2]):
                    write_generated(writer, number, rows, end=MOST_TOKENS)
            else:
                [rows] = sequences
                generated = rows.pos[rows.phase == Phase.DECODE]
                middle = (int(generated.max() - generated.min()) + 1) // 2
                ends = (0, middle) if part == 0 else (middle, None)
                write_generated(writer, 0, rows, *ends)
        parts.append(path)
    return parts[0], parts[1]


def main() -> None:
    """Print a row for each trace, cache and part."""
    print("| trace | cache | part |" + "".join(f" {r:.0%} |" for r in RATIOS))
    print("|---|---|---|" + "---|" * len(RATIOS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, file in TRACES.items():
            whole = folder / f"{file}.parquet"
            import_trace(SHARED / f"{file}.parquet", whole, shape=model_shape(model))
            parts = halves(open_trace(whole), folder)
            for part, (judged, calibration) in enumerate((parts[::-1], parts)):
                for cache in CACHES:
                    counts = [
                        replay_cache(judged, cache, warm=calibration, cache_ratio=ratio)
                        for ratio in RATIOS
                    ]
                    cells = [f" {each['hit_rate_active']:.1%} |" for each in counts]
                    print(f"| {model} | {cache} | {part + 1} |" + "".join(cells))


if __name__ == "__main__":
    main()

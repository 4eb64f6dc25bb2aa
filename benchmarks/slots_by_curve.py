"""What it is worth to divide cache slots among layers by their curves, on recorded
routing: ``python -m benchmarks.slots_by_curve``.

Each trace is cut in two. One part is the calibration, which divides the slots and fills
the caches; the other is judged; then they change places. Single sequences are halved,
of several every other one is taken. Equal slots begin with the same experts.
"""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.replay_speed import SHARED
from moesim.runs.replay import replay, replay_cache
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
BLOCKS = 8
"""Of the judged part, whose scatter is the noise."""
MOST_SEQUENCES = 16
MOST_TOKENS = 150
SYSTEM = "greedy+lru"
MACHINE = "rtx4060ti"


class Gain(NamedTuple):
    """Hits of slots by curve less those of equal slots, in points of all accesses.

    `noise`: two standard errors over blocks of tokens.
    """

    equal: float
    gain: float
    noise: float


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


def hits_by_block(
    judged: Path, calibration: Path, cache: str, ratio: float, scope: str
) -> np.ndarray:
    """Hits of each block of forward passes, int64 [BLOCKS], and accesses in all."""
    steps = sum(1 + int(rows.pos.max()) for rows in open_trace(judged).sequences())
    edges = np.linspace(0, steps, BLOCKS + 1).astype(int)[1:]
    counts = [
        replay_cache(
            judged,
            cache,
            warm=calibration,
            cache_ratio=ratio,
            cache_scope=scope,
            steps=int(edge),
        )
        for edge in edges
    ]
    hits = np.array([count["hits"] for count in counts])
    return np.append(np.diff(hits, prepend=0), counts[-1]["accesses"])


def gain_of(judged: Path, calibration: Path, cache: str, ratio: float) -> Gain:
    """What slots by curve gain."""
    *equal, accesses = hits_by_block(judged, calibration, cache, ratio, "layer")
    *curved, _ = hits_by_block(judged, calibration, cache, ratio, "by-curve")
    each = 100.0 * BLOCKS * (np.array(curved) - np.array(equal)) / accesses
    return Gain(
        equal=100.0 * sum(equal) / accesses,
        gain=float(each.mean()),
        noise=float(2.0 * each.std(ddof=1) / np.sqrt(BLOCKS)),
    )


def speed_of(judged: Path, calibration: Path, ratio: float, scope: str) -> float:
    """Seconds per generated token of one system on one machine."""
    run = replay(
        judged,
        SYSTEM,
        hw=MACHINE,
        warm=calibration,
        cache_ratio=ratio,
        cache_scope=scope,
        keep=False,
    )
    return float(run.metrics["tpot_s"])


def main() -> None:
    """Print a row for each trace, cache, size and part."""
    worse = 0
    gains: dict[str, list[float]] = {cache: [] for cache in CACHES}
    faster = []
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
                    row = [gain_of(judged, calibration, cache, r) for r in RATIOS]
                    worse += sum(cell.gain < -cell.noise for cell in row)
                    gains[cache] += [cell.gain for cell in row]
                    cells = [
                        f" {cell.equal:.1f} {cell.gain:+.2f} ± {cell.noise:.2f} |"
                        for cell in row
                    ]
                    print(f"| {model} | {cache} | {part + 1} |" + "".join(cells))
                speeds = [
                    speed_of(judged, calibration, r, "layer")
                    / speed_of(judged, calibration, r, "by-curve")
                    for r in RATIOS
                ]
                faster += speeds
                cells = [f" {100 * (ratio - 1):+.1f} % |" for ratio in speeds]
                print(f"| {model} | {SYSTEM}, speed | {part + 1} |" + "".join(cells))
    for cache, values in gains.items():
        print(
            f"{cache}: {np.mean(values):+.2f} points in the mean, {min(values):+.2f} to"
            f" {max(values):+.2f}"
        )
    print(f"worse by more than noise: {worse} of {sum(map(len, gains.values()))}")
    print(
        f"{SYSTEM} on {MACHINE}: {100 * (np.mean(faster) - 1):+.2f} % tokens/s in the"
        f" mean, {100 * (min(faster) - 1):+.1f} to {100 * (max(faster) - 1):+.1f}"
    )


if __name__ == "__main__":
    main()

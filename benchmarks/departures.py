"""What the admitted departures of systems are worth: each is closed, or bounded.

Replays shared traces with and without a stand-in for what a system's composition leaves
out, and prints one table per departure. Traces are those that `benchmarks.prefetchers
prepare` writes::

    python -m benchmarks.departures INPUTS edgemoe moe-infinity moe-lightning smoe
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.prefetchers import SINGLE, parts
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.runs.result import Run
    from moesim.traces.format.reader import SequenceRows

HW = "rtx3090-epyc7532"
STEPS = 40
RATIOS = (0.25, 0.5)
TRACES = (
    "mixtral_8x7b_like",
    "deepseek_v2_lite_like",
    "qwen3_30b_a3b_top6",
    "olmoe_1b_7b_decode299",
)


def replayed(inputs: Path, trace: str, system: str, **options: Any) -> Run:
    """Replay one shared trace."""
    from moesim import replay

    options = {"hw": HW, "steps": STEPS, **options}
    return replay(inputs / f"{trace}.parquet", system, **options)


def step_ms(run: Run) -> float:
    """Milliseconds per forward pass."""
    return float(1e3 * run.metrics["makespan_s"] / run.metrics["steps"])


def rows(*cells: object) -> None:
    """Print one row of a table."""
    texts = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"| {' | '.join(texts)} |", flush=True)


def edgemoe(inputs: Path) -> None:
    """Eviction by layers as well, and experts of unequal widths."""
    print("\nedgemoe: eviction by frequency alone and by layer too; ms per pass")
    rows("trace", "scope", "cache", "lfu", "edgemoe", "edgemoe / lfu", "hits")
    for trace in TRACES:
        for scope in ("layer", "global"):
            for ratio in RATIOS:
                plain, both = (
                    replayed(
                        inputs,
                        trace,
                        "edgemoe",
                        cache=cache,
                        cache_scope=scope,
                        cache_ratio=ratio,
                    )
                    for cache in ("lfu", "edgemoe")
                )
                hits = [run.metrics["hit_rate_active"] for run in (plain, both)]
                change = step_ms(both) / step_ms(plain)
                shown = f"{hits[0]:.1%} / {hits[1]:.1%}"
                rows(trace, scope, ratio, step_ms(plain), step_ms(both), change, shown)

    print("\nedgemoe: widths of experts, 4.5 bits in the mean; ms per pass")
    rows("trace", "cache", "4.5 bits", *WIDTHS, "random: least, most")
    print("then bytes over the link, over those with one width")
    for trace in TRACES:
        with tempfile.TemporaryDirectory() as folder:
            paths = _widened(inputs, trace, Path(folder))
            for ratio in RATIOS:
                runs = {
                    name: replayed(path.parent, path.stem, "edgemoe", cache_ratio=ratio)
                    for name, path in paths.items()
                }
                _print_widths(trace, ratio, runs)


BITS = (8, 4, 2)
SHARES = (0.25, 0.5, 0.25)
WIDTHS = ("popular wide", "popular narrow")
_SEEDS = range(5)


def _widened(inputs: Path, trace: str, folder: Path) -> dict[str, Path]:
    """One width for all experts, and several of the same mean: name -> trace."""
    from moesim.traces.synthetic.widths import set_widths

    source = inputs / f"{trace}.parquet"
    mean_bits = sum(bits * share for bits, share in zip(BITS, SHARES, strict=True))
    options: dict[str, dict[str, Any]] = {"one": {"bits": [mean_bits]}}
    for name, bits in zip(WIDTHS, (BITS, BITS[::-1]), strict=True):
        options[name] = {"bits": bits, "shares": SHARES, "by": "popularity"}
    for seed in _SEEDS:
        options[f"random {seed}"] = {"bits": BITS, "shares": SHARES, "seed": seed}
    return {
        name: set_widths(source, folder / f"{name}.parquet", **given).path
        for name, given in options.items()
    }


def _print_widths(trace: str, ratio: float, runs: dict[str, Run]) -> None:
    """Milliseconds per pass, then bytes over the link relative to one width."""
    copied = {
        name: sum(n for lane, n in run.metrics["bytes"].items() if "h2d" in lane)
        for name, run in runs.items()
    }
    for figure in (
        {name: step_ms(run) for name, run in runs.items()},
        {name: copied[name] / copied["one"] for name in runs},
    ):
        random = [figure[f"random {seed}"] for seed in _SEEDS]
        named = [figure[name] for name in WIDTHS]
        extremes = f"{min(random):.3f}, {max(random):.3f}"
        rows(trace, ratio, figure["one"], *named, extremes)


def moe_infinity(inputs: Path) -> None:
    """The whole queue instead of its head, and what a batch's sequences could tell."""
    print("\nmoe-infinity: the head of its queue or all of it; ms per pass")
    rows("trace", "batch", "cache", "head of 8", "all", "prefetched", "prefetched")
    for trace in TRACES[:2]:
        for batch in (1, 8):
            for ratio in RATIOS:
                # Something is known only when the first sequences have ended.
                head, whole = (
                    replayed(
                        inputs,
                        trace,
                        "moe-infinity",
                        prefetch=f"activation-matrix:size={size}",
                        batch=batch,
                        steps=140,
                        cache_ratio=ratio,
                    )
                    for size in ("8", "none")
                )
                counts = [run.metrics["prefetched"] for run in (head, whole)]
                rows(trace, batch, ratio, step_ms(head), step_ms(whole), *counts)

    print("\nmoe-infinity: a batch as one sequence, and two bounds; ms per pass")
    rows("trace", "batch", "cache", "none", "as one", "all guesses right")
    for trace in TRACES[:2]:
        for batch in (1, 8, 32):
            for ratio in RATIOS:
                runs = [
                    replayed(
                        inputs,
                        trace,
                        "moe-infinity",
                        prefetch=prefetch,
                        batch=batch,
                        steps=140,
                        cache_ratio=ratio,
                    )
                    for prefetch in ("none", "activation-matrix", "clairvoyant")
                ]
                rows(trace, batch, ratio, *map(step_ms, runs))


def moe_lightning(inputs: Path) -> None:
    """What streaming ahead is worth, and what attention elsewhere and micro-batches
    could save at most: everything but the longest lane.
    """
    print("\nmoe-lightning: its stream on demand and ahead; shares of a pass")
    rows("trace", "batch", "cache", "on demand", "ahead", "dense", "KV", "busiest lane")
    for trace in TRACES[:2]:
        for batch in (1, 8, 32, 96):
            for ratio in RATIOS:
                on_demand, ahead = (
                    replayed(
                        inputs,
                        trace,
                        "moe-lightning",
                        prefetch=prefetch,
                        batch=batch,
                        cache_ratio=ratio,
                        steps=24,
                    )
                    for prefetch in ("none", "moe-lightning")
                )
                busy = {
                    lane: seconds / ahead.metrics["makespan_s"]
                    for lane, seconds in ahead.metrics["busy_s"].items()
                    if not lane.startswith("control")
                }
                lane = max(busy, key=lambda name: busy[name])
                total_ms = step_ms(ahead)
                rows(
                    trace,
                    batch,
                    ratio,
                    step_ms(on_demand),
                    total_ms,
                    f"{1e3 * parts(ahead)['dense'] / total_ms:.1%}",
                    f"{_kv_share(inputs, trace, batch, total_ms):.2%}",
                    f"{lane} {busy[lane]:.1%}",
                )


def _kv_share(inputs: Path, trace: str, batch: int, step_ms: float) -> float:
    """Share of a pass that reading keys and values takes, at 128 tokens of context."""
    from moesim import open_trace
    from moesim.hwprofiles.costs import Costs
    from moesim.hwprofiles.profile import load_profile

    shape = open_trace(inputs / f"{trace}.parquet").shape
    costs = Costs(load_profile(HW), shape)
    with_context_s = costs.dense_s(batch, 128, batch)
    without_s = costs.dense_s(batch, 1, batch)
    return 1e3 * shape.layers * (with_context_s - without_s) / step_ms


def smoe(inputs: Path) -> None:
    """Its predictor at several accuracies: 0.82 and 0.95 are published."""
    from moesim.traces.format.reader import open_trace
    from moesim.traces.synthetic.predict import predict

    print("\nsmoe: recall of what stands in for the partial hidden state; ms per pass")
    recalls = (0.75, 0.82, 0.95)
    rows("trace", "batch", "cache", *recalls, "no prefetch")
    for trace in TRACES[:2]:
        with tempfile.TemporaryDirectory() as folder:
            for recall in recalls:
                source = inputs / "unpredicted" / f"{trace}.parquet"
                target = Path(folder) / f"{recall}" / f"{trace}.parquet"
                target.parent.mkdir()
                predict(source, target, recall=(recall,), scores=True)
                assert open_trace(target).rows
            batches = (1,) if trace in SINGLE else (1, 8)
            for batch in batches:
                for ratio in RATIOS:
                    runs = [
                        replayed(
                            Path(folder) / f"{recall}",
                            trace,
                            "smoe",
                            batch=batch,
                            cache_ratio=ratio,
                        )
                        for recall in recalls
                    ]
                    last = Path(folder) / f"{recalls[-1]}"
                    without = replayed(
                        last,
                        trace,
                        "smoe",
                        prefetch="none",
                        batch=batch,
                        cache_ratio=ratio,
                    )
                    rows(trace, batch, ratio, *map(step_ms, [*runs, without]))


def smoe_accuracy(inputs: Path) -> None:
    """Predictions that foresee the best expert as often as published, 82 %: how often
    their first guess is active, and their recall over all experts of a token.
    """
    from moesim.traces.format.reader import open_trace
    from moesim.traces.synthetic.predict import predict

    print("\nsmoe: predictions of recall at 1 0.82")
    rows("trace", "best foreseen", "first guess active", "recall")
    for name in TRACES[:3]:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "predicted.parquet"
            source = inputs / "unpredicted" / f"{name}.parquet"
            predict(source, target, recall=(0.82,), at=1, scores=True)
            trace = open_trace(target)
            hits = np.zeros(4)
            for part in trace.sequences(["pred1_raw"]):
                hits += _foreseen(part, trace.shape.layers)
        rows(name, *(hits[:3] / (hits[3], hits[3], hits[3] * trace.shape.top_k)))


def _foreseen(rows_of: SequenceRows, layers: int) -> np.ndarray:
    """Best experts foreseen, first guesses that are active, experts foreseen, and rows
    with a prediction, of generated tokens: those have rows in all layers.
    """
    generated = rows_of.phase == Phase.DECODE
    scores = rows_of.columns["pred1_raw"][generated].astype(np.float32)
    experts = rows_of.experts[generated]
    used = experts.reshape(-1, layers, experts.shape[1])[:, 1:]
    guesses = np.argsort(-scores, axis=1, kind="stable")[:, : used.shape[2]]
    guesses = guesses.reshape(-1, layers, used.shape[2])[:, :-1]
    return np.array(
        [
            (guesses[..., 0] == used[..., 0]).sum(),
            (guesses[..., :1] == used).sum(),
            (guesses[..., None] == used[:, :, None, :]).sum(),
            used[..., 0].size,
        ],
        np.float64,
    )


def finemoe(inputs: Path) -> None:
    """Beside the systems that its paper compares with, with parts replaced, and the
    misses of the layers that it prefetches nothing for.
    """
    print(
        "\nfinemoe: ms per pass, hits; last the share of misses in three first layers"
    )
    others: list[dict[str, str]] = [
        {"system": "deepspeed"},
        {"system": "mixtral-offloading", "prefetch": "next-gate"},
        {"system": "moe-infinity"},
        {"system": "finemoe"},
        {"system": "finemoe", "prefetch": "none"},
        {"system": "finemoe", "cache": "lfu"},
    ]
    for trace in TRACES[:3]:
        for ratio in RATIOS:
            cells = []
            for parts_of in others:
                run = replayed(inputs, trace, steps=140, cache_ratio=ratio, **parts_of)
                cells.append(
                    f"{step_ms(run):.1f} ({run.metrics['hit_rate_active']:.1%})"
                )
                if parts_of == {"system": "finemoe"}:
                    accesses = run.timeline.access_frame()
                    missed = accesses[accesses["state"] == "miss"]
            rows(trace, ratio, *cells, f"{(missed['layer'] < 3).mean():.1%}")


def fate(inputs: Path) -> None:
    """Beside loads on demand, and experts of paths of the past, which its paper
    compares with, and with parts replaced.
    """
    print("\nfate: ms per pass, hits; last the share of prefetches that were used")
    others: list[dict[str, str]] = [
        {"system": "on-demand", "cache": "lru"},
        {"system": "moe-infinity"},
        {"system": "fate"},
        {"system": "fate", "prefetch": "none"},
        {"system": "fate", "prefetch": "next-gate"},
        {"system": "fate", "cache": "lru"},
    ]
    for trace in TRACES[:3]:
        for ratio in RATIOS:
            runs = [
                replayed(inputs, trace, steps=140, cache_ratio=ratio, **parts_of)
                for parts_of in others
            ]
            cells = [
                f"{step_ms(run):.1f} ({run.metrics['hit_rate_active']:.1%})"
                for run in runs
            ]
            used = runs[2].metrics["prefetch_accuracy"]
            rows(trace, ratio, *cells, f"{used:.1%}")


DEPARTURES: dict[str, Callable[[Path], None]] = {
    "edgemoe": edgemoe,
    "moe-infinity": moe_infinity,
    "moe-lightning": moe_lightning,
    "smoe": smoe,
    "smoe-accuracy": smoe_accuracy,
    "finemoe": finemoe,
    "fate": fate,
}


def main() -> None:
    """Print the tables of the systems that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("systems", nargs="*", help=f"of {', '.join(DEPARTURES)}")
    chosen = parser.parse_args()
    for name in chosen.systems or DEPARTURES:
        DEPARTURES[name](chosen.inputs)


if __name__ == "__main__":
    main()

"""How much synthetic traces are like the real ones they were fitted to: bits that
layers share, curves, loads, overlap.

``python -m benchmarks.likeness qwen3_30b_a3b_top6`` compares one trace only; ``--seed
2`` draws another one, ``--times 20`` one twenty times as long.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.replay_speed import MODELS, SHARED, SHIPPED
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.stats.similarity import mutual_information_bits
from moesim.traces.stats.trace_summary import summarise_trace
from moesim.traces.synthetic.fit import fit
from moesim.traces.synthetic.generate import synthesise

if TYPE_CHECKING:
    from moesim.traces.format.reader import Trace

MOST_TOKENS = 12_000
GAPS = (1, 2, 4)
FAR = 8
SEQUENCES = 40


def pair_bits(trace: Trace, gap: int, sequences: int = SEQUENCES) -> np.ndarray:
    """Plug-in bits between every two layers `gap` apart, over the generated tokens of
    the first sequences.

    Returns:
        float64 [L - gap].
    """
    layers = trace.shape.layers
    experts = trace.shape.experts
    joint = np.zeros((layers - gap, experts, experts), np.int64)
    for rows in itertools.islice(trace.sequences(), sequences):
        decode = (
            rows.experts[rows.phase == Phase.DECODE]
            .reshape(-1, layers, trace.shape.top_k)
            .astype(np.int64)
        )
        for layer in range(layers - gap):
            pairs = (
                decode[:, layer, :, None] * experts + decode[:, layer + gap, None, :]
            )
            joint[layer] += np.bincount(pairs.ravel(), minlength=experts**2).reshape(
                experts, experts
            )
    return np.array([mutual_information_bits(table) for table in joint])


def likeness(
    real: Trace, place: Path, *, seed: int = 1, times: int = 1
) -> dict[str, float]:
    """Fit, draw as many tokens (at most `MOST_TOKENS`) or so many `times` more, and
    compare.

    Returns:
        ``tokens``; means over layers of ``bits`` between adjacent layers, of ``far``
        between those `FAR` apart (nan where there are none) and of ``overlap`` of
        adjacent tokens, each also ``_drawn``; the largest differences of any two layers
        ``worst_GAP`` apart, in bits, and of hit rates at any size, ``lru`` and
        ``belady``; ``load``, the mean total variation of the experts' shares of a
        layer.
    """
    expected = summarise_trace(real)
    tokens = times * min(
        MOST_TOKENS,
        expected.figures["prefill_tokens"] + expected.figures["decode_tokens"],
    )
    synthesise(fit(real), place, tokens=tokens, seed=seed)
    drawn = open_trace(place)
    found = summarise_trace(drawn)
    both = (expected, found)
    bits = {
        gap: [pair_bits(trace, gap) for trace in (real, drawn)]
        for gap in (*GAPS, FAR)
        if gap < real.shape.layers
    }
    far = bits.pop(FAR, [np.array([np.nan])] * 2)
    overlaps = [float(np.mean(one.figures["overlap"])) for one in both]
    shares = [one.load / one.load.sum(axis=1, keepdims=True) for one in both]
    curves = {
        name: [np.array(one.figures["curve_decode"][name]) for one in both]
        for name in ("lru", "belady")
    }
    return {
        "tokens": tokens,
        "bits": float(np.mean(expected.figures["information_bits"])),
        "bits_drawn": float(np.mean(found.figures["information_bits"])),
        "far": float(far[0].mean()),
        "far_drawn": float(far[1].mean()),
        **{
            f"worst_{gap}": float(np.abs(one[0] - one[1]).max())
            for gap, one in bits.items()
        },
        **{name: float(np.abs(one[0] - one[1]).max()) for name, one in curves.items()},
        "load": float(np.abs(shares[0] - shares[1]).sum(axis=1).mean() / 2),
        "overlap": overlaps[0],
        "overlap_drawn": overlaps[1],
    }


def report(names: list[str] | None = None, *, seed: int = 1, times: int = 1) -> None:
    """Print a line for the shipped trace and each of `MODELS`, or for those of them
    that are named.
    """
    print(f"synthetic traces against what they were fitted to, seed {seed}")
    with tempfile.TemporaryDirectory() as folder:
        for name in names or [SHIPPED.stem, *MODELS]:
            trace = SHIPPED
            if name in MODELS:
                source = SHARED / f"{name}.parquet"
                trace = Path(folder) / f"{name}.parquet"
                if not source.is_file():
                    print(f"  {name}: not beside this checkout, not measured")
                    continue
                import_trace(source, trace, shape=model_shape(MODELS[name]))
            one = likeness(
                open_trace(trace),
                Path(folder) / "drawn.parquet",
                seed=seed,
                times=times,
            )
            worst = "; ".join(f"{one[f'worst_{gap}']:.2f}" for gap in GAPS)
            print(
                f"  {name}: {one['tokens']:,} tokens; {one['bits']:.2f} /"
                f" {one['bits_drawn']:.2f} bits between adjacent layers,"
                f" {one['far']:.2f} / {one['far_drawn']:.2f} at {FAR} apart, worst pair"
                f" {worst} bits at {', '.join(map(str, GAPS))} apart; LRU"
                f" {100 * one['lru']:.1f}, Belady {100 * one['belady']:.1f} points;"
                f" loads {one['load']:.2f}; overlap {one['overlap']:.2f} /"
                f" {one['overlap_drawn']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "names",
        nargs="*",
        metavar="TRACE",
        help=f"of {', '.join([SHIPPED.stem, *MODELS])}; default: all",
    )
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--times", type=int, default=1)
    chosen = options.parse_args()
    report(chosen.names, seed=chosen.seed, times=chosen.times)

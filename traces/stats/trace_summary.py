"""All that a trace says about itself, and what follows for offloading, in one pass; in
a second one where sequences run together, and for recorded predictions.

Statistics are about decode unless they say otherwise; the definitions stand with the
folds that make them: `stats`, `curves`, `similarity`, `foresight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from moesim.traces.format.layer_steps import joined, layer_steps, of_sequences
from moesim.traces.format.schema import Phase
from moesim.traces.sizes import format_bytes
from moesim.traces.stats.hit_rate_curves import CurveFold
from moesim.traces.stats.predictor_accuracy import prediction
from moesim.traces.stats.similarity import Resemblance
from moesim.traces.stats.statistics import LayerFold, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moesim.traces.format.reader import SequenceRows, Trace
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.stats.hit_rate_curves import Curves

DENSE = 0.25
"""Share of a layer's experts that one step uses, from which on offloading moves most of
the model at every token.
"""
LOCAL = 0.15
SLIGHT = 0.05
"""Hit rate of LRU above the share that is cached, at the knee: locality worth caching
for; hardly any.
"""
COPY_BYTES_PER_S = 25e9
"""For a feeling only: what a PCIe 4.0 x16 link copies; profiles hold measured
figures.
"""


@dataclass(slots=True)
class Survey:
    """What `survey` found.

    Attributes:
        shape: the model.
        figures: JSON-ready; the keys of `moesim.traces.stats.statistics.stats`, and
            those listed at `survey`.
        curves: hit counts at every size.
        load: int64 [L, E] tokens routed to each expert in decode.
    """

    shape: ModelShape
    figures: dict[str, Any]
    curves: Curves
    load: np.ndarray


def survey(
    trace: Trace, *, batch: int = 1, progress: Callable[[int], None] | None = None
) -> Survey:
    """Characterise a trace. L layers, E experts, K per token.

    Args:
        trace: an opened trace.
        batch: sequences that run together; changes loads, reuse and curves.
        progress: told the rows read so far, after each sequence.

    Returns:
        figures with the keys of `stats` and

        - ``reuse``: [E + 1] accesses by the number of other experts used since (last:
            first use), all layers;
        - ``working_set_by_window``: window in decode steps -> mean distinct experts of
            a layer;
        - ``curve_decode``, ``curve_all``: ``lru`` and ``belady`` hit rates [E + 1] at 0
          … E slots per layer, and ``lru_global``, ``belady_global`` [L * E + 1], one
          cache for all layers; null without accesses;
        - ``similarity``, ``similarity_by_layer``: prefill to decode, mean over
            sequences that have both;
        - ``information_bits`` [L - 1], ``information_bias_bits``: what a layer's
            experts tell about the next one's;
        - ``consistency``: segment tokens -> [L], share of choices served by the K
            experts most used in the segment;
        - ``prediction``: see `foresight.prediction`;
        - ``verdict``: see `verdict`.

    Raises:
        TraceError: `batch` below 1, or a damaged trace.
    """
    shape = trace.shape
    fold = LayerFold(shape.layers, shape.experts, shape.top_k)
    curve = CurveFold(shape)
    alike = Resemblance(shape)

    def read() -> Iterator[SequenceRows]:
        rows = 0
        for sequence in trace.sequences():
            alike.add(sequence)
            yield sequence
            rows += len(sequence.pos)
            if progress is not None:
                progress(rows)

    blocks = (
        joined(of_sequences(read(), shape.layers, shape.experts))
        if batch == 1
        else layer_steps(trace, batch=batch)
    )
    for block in blocks:
        fold.add(block)
        curve.add(block)
    if batch > 1:
        for _ in read():
            pass
    curves = curve.end()
    figures = summary(fold, shape, batch)
    figures |= {
        "reuse": fold.distances.sum(axis=0).tolist(),
        "working_set_by_window": {
            str(size): float(sets.mean()) for size, sets in fold.working_sets().items()
        },
        "curve_decode": _rates(curves, Phase.DECODE),
        "curve_all": _rates(curves, None),
        **alike.figures(),
        "prediction": prediction(trace, batch=batch),
    }
    figures["verdict"] = verdict(shape, figures)
    return Survey(shape, figures, curves, fold.load)


def _rates(curves: Curves, phase: Phase | None) -> dict[str, list[float]] | None:
    if not curves.accesses("lru", phase).sum():
        return None
    return {
        name: curves.rates(name, phase).tolist()
        for name in ("lru", "belady", "lru_global", "belady_global")
    }


def knee(rates: np.ndarray) -> int:
    """Slots at which a curve [E + 1] stands farthest above the straight line from
    nothing to everything cached.

    Source: Satopaa et al. (2011), the knee of a normalised concave curve.
    """
    return int(np.argmax(rates - np.linspace(0.0, rates[-1], len(rates))))


def verdict(shape: ModelShape, figures: dict[str, Any]) -> dict[str, Any]:
    """Is this model worth offloading, and with how much memory?

    Returns:
        ``answer`` (``yes``, ``hardly``, ``no``, ``unknown``), ``why`` in words, and
        ``sizes``: for the knee of LRU's curve and for hit rates of 80, 90 and 95 % the
        slots per layer, their bytes, hit rates of LRU and Belady, and the bytes that an
        LRU cache copies per decode step if every miss is copied.
    """
    curve = figures["curve_decode"]
    total = sum(shape.expert_bytes) * shape.experts
    if curve is None:
        why = [
            (
                "No generated tokens: a prompt uses nearly all experts once, which says"
                " nothing about caching."
            )
        ]
        return {"answer": "unknown", "why": why, "sizes": [], "experts_bytes": total}
    lru = np.array(curve["lru"])
    belady = np.array(curve["belady"])
    share = float(np.mean(figures["active"])) / shape.experts
    bend = knee(lru)
    marks = {"knee": bend} | {
        f"{goal:.0%}": int(np.argmax(lru >= goal))
        for goal in (0.8, 0.9, 0.95)
        if lru[-1] >= goal
    }
    step_bytes = sum(shape.expert_bytes) * share * shape.experts
    sizes = [
        {
            "at": name,
            "slots": slots,
            "bytes": slots * sum(shape.expert_bytes),
            "lru": float(lru[slots]),
            "belady": float(belady[slots]),
            "copied_bytes_per_step": float((1 - lru[slots]) * step_bytes),
        }
        for name, slots in marks.items()
    ]
    gain = float(lru[bend] - bend / shape.experts)
    answer = (
        "no"
        if share > DENSE
        else "yes"
        if gain >= LOCAL
        else "hardly"
        if gain >= SLIGHT
        else "no"
    )
    return {
        "answer": answer,
        "why": _why(shape, sizes[0], share, gain, total),
        "sizes": sizes,
        "experts_bytes": total,
    }


def _why(
    shape: ModelShape, best: dict[str, Any], share: float, gain: float, total: int
) -> list[str]:
    """Sentences."""
    copied = best["copied_bytes_per_step"]
    words = [
        (
            f"All {shape.layers} x {shape.experts} experts weigh {format_bytes(total)};"
            f" a decode step uses {share:.1%}."
        ),
        (
            f"The curve of LRU bends at {best['slots']} of {shape.experts} experts per"
            f" layer ({format_bytes(best['bytes'])}): {best['lru']:.1%} hits,"
            f" {gain:+.1%} against equally used experts; Belady, who knows the future,"
            f" {best['belady']:.1%}."
        ),
        (
            f"What is missing there is {format_bytes(round(copied))} per decode step:"
            f" {copied / COPY_BYTES_PER_S * 1e3:.1f} ms if all of it were copied at"
            f" {COPY_BYTES_PER_S / 1e9:.0f} GB/s, computing and overlap left out."
        ),
    ]
    if share > DENSE:
        words.append(
            "Too dense: every step needs more than a quarter of the experts, so most of"
            " the model moves."
        )
    elif gain < SLIGHT:
        words.append(
            "Hardly any locality: a cache hits little more than the share of experts"
            " that it holds."
        )
    elif gain < LOCAL:
        words.append(
            "Little locality: bandwidth or the CPU, not the cache, will decide the"
            " speed."
        )
    else:
        words.append(
            "A part of the experts serves most accesses; `moesim replay` tells the time"
            " that a machine needs."
        )
    if shape.assumed:
        words.append(f"The sizes rest on assumed fields: {', '.join(shape.assumed)}.")
    return words

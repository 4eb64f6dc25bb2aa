"""A trace's statistics as figures, one function each.

A function draws onto an axis that it is given, and answers whether the trace has
anything to show: without generated tokens, most figures have no meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.reporting.figures import QUIET
from moesim.reporting.figures import STRONG as LRU
from moesim.traces.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.traces.stats.trace_summary import TraceSummary

BELADY = "#d1774c"
MOST_LOAD = 4
"""Colours end at so many times the even load; few experts are beyond it."""


def draw_curves(axis: Any, summary: TraceSummary) -> bool:
    """Hit rates of LRU and Belady over the size of the cache."""
    curve = summary.figures["curve_decode"]
    if curve is None:
        return False
    experts = summary.shape.experts
    slots = np.arange(experts + 1)
    for name, colour, label in (
        ("belady", BELADY, "Belady, knows the future"),
        ("lru", LRU, "LRU"),
    ):
        axis.plot(slots, curve[name], color=colour, label=label, lw=2)
    for name, colour, label in (
        ("belady_global", BELADY, "Belady"),
        ("lru_global", LRU, "LRU"),
    ):
        # One cache for all layers has a point for every slot. Every L-th of them holds
        # as many experts per layer as the other curves.
        shared = np.array(curve[name])[:: summary.shape.layers]
        axis.plot(
            slots,
            shared,
            color=colour,
            ls=":",
            label=f"{label}, one cache for all layers",
        )
    axis.plot([0, experts], [0, 1], color=QUIET, lw=1, label="equally used experts")

    # The first of the sizes is the knee.
    for size in summary.figures["verdict"]["sizes"][:1]:
        axis.axvline(size["slots"], color=QUIET, ls="--", lw=1)
        label = f" knee: {size['slots']}, {format_bytes(size['bytes'])}"
        axis.text(size["slots"], 0.02, label, fontsize=9)
    axis.set(
        xlabel="experts cached per layer",
        ylabel="hit rate in decode",
        xlim=(0, experts),
        ylim=(0, 1.02),
    )
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    return True


def draw_load(axis: Any, summary: TraceSummary) -> bool:
    """Tokens per expert against an even load, busiest experts first."""
    if not summary.load.any():
        return False
    even = summary.load.sum(axis=1, keepdims=True) / summary.shape.experts
    # A layer without any decode token has no even load to divide by.
    ranked = -np.sort(-(summary.load / np.maximum(even, 1e-9)), axis=1)
    image = axis.imshow(
        np.minimum(ranked, MOST_LOAD),
        aspect="auto",
        cmap="Blues",
        interpolation="nearest",
        vmin=0,
        vmax=MOST_LOAD,
    )
    axis.figure.colorbar(image, ax=axis, label="load over even load (4 and more)")
    axis.set(xlabel="experts of a layer, busiest first", ylabel="layer")
    return True


def draw_entropy(axis: Any, summary: TraceSummary) -> bool:
    """Entropy of each layer's load."""
    bits = summary.figures["entropy_bits"]
    even = np.log2(summary.shape.experts)
    return _draw_by_layer(axis, bits, "bits", even, "even load")


def draw_overlap(axis: Any, summary: TraceSummary) -> bool:
    """Active experts that the step before used."""
    return _draw_by_layer(
        axis,
        summary.figures["overlap"],
        "share used again",
        summary.figures["overlap_chance"],
        "by chance",
    )


def draw_similarity(axis: Any, summary: TraceSummary) -> bool:
    """Cosine of the loads in prefill and decode."""
    cosines = summary.figures["similarity_by_layer"]
    return _draw_by_layer(axis, cosines, "cosine", 1.0, "the same loads")


def draw_information(axis: Any, summary: TraceSummary) -> bool:
    """Mutual information of neighbouring layers, and the bias of its estimate."""
    return _draw_by_layer(
        axis,
        summary.figures["information_bits"],
        "bits",
        summary.figures["information_bias_bits"],
        "bias: independent layers, tokens",
    )


def _draw_by_layer(
    axis: Any, values: list[float] | None, label: str, level: float, meaning: str
) -> bool:
    """A bar per layer, and a line to compare them with."""
    if not values:
        return False
    axis.bar(range(len(values)), values, color=LRU)
    axis.axhline(level, color=BELADY, lw=1, label=meaning)
    axis.set(xlabel="layer", ylabel=label)
    axis.legend(frameon=False, fontsize=9)
    return True


def draw_reuse(axis: Any, summary: TraceSummary) -> bool:
    """Distribution of reuse distances."""
    reuse = np.array(summary.figures["reuse"])
    if not reuse.sum():
        return False
    # The last entry counts first uses, which have no distance.
    axis.bar(range(len(reuse) - 1), reuse[:-1] / reuse.sum(), color=LRU, width=1.0)
    axis.set(xlabel="other experts of the layer used since", ylabel="share of accesses")
    return True


def draw_working_set(axis: Any, summary: TraceSummary) -> bool:
    """Distinct experts over the length of a window."""
    sets = summary.figures["working_set_by_window"]
    if not sets:
        return False
    # Windows are keys of a JSON object, hence text.
    windows = [int(window) for window in sets]
    axis.plot(windows, list(sets.values()), "o-", color=LRU)
    axis.axhline(summary.shape.experts, color=QUIET, lw=1)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="window, decode steps", ylabel="distinct experts of a layer")
    return True


def draw_consistency(axis: Any, summary: TraceSummary) -> bool:
    """Segment routing consistency by layer, a line for each length of segments."""
    consistency = summary.figures["consistency"]
    curves = {length: shares for length, shares in consistency.items() if shares}
    for rank, (length, shares) in enumerate(curves.items()):
        axis.plot(shares, color=LRU, alpha=1 - 0.2 * rank, label=f"{length} tokens")
    axis.set(xlabel="layer", ylabel="choices served", ylim=(0, 1))
    if curves:
        axis.legend(frameon=False, fontsize=9)
    return bool(curves)


def draw_prediction(axis: Any, summary: TraceSummary) -> bool:
    """Accuracy of the recorded predictions, by rank of the true workload."""
    predictors = summary.figures["prediction"] or {}
    for name, predictor in predictors.items():
        label = name
        if predictor["accuracy"] is not None:
            label = f"{name}, {predictor['depth']} ahead: {predictor['accuracy']:.1%}"
        # A rank that no layer step reached has no accuracy.
        points = [
            (rank, share)
            for rank, share in enumerate(predictor["by_rank"], start=1)
            if share is not None
        ]
        ranks = [rank for rank, _ in points]
        axis.plot(ranks, [share for _, share in points], "o-", label=label)
    axis.set(
        xlabel="experts of largest workload", ylabel="share predicted", ylim=(0, 1.02)
    )
    if predictors:
        axis.legend(frameon=False, fontsize=9)
    return bool(predictors)


PANELS: tuple[tuple[str, str, Callable[[Any, Any], bool]], ...] = (
    (
        "How large a cache?",
        (
            "Cold caches of every size, driven step by step in replay order; decode"
            " accesses."
        ),
        draw_curves,
    ),
    ("Which experts work?", "One row per layer.", draw_load),
    ("How evenly?", "Entropy of the load over experts.", draw_entropy),
    (
        "Used again at the next token?",
        "Share of a step's active experts that the step before used.",
        draw_overlap,
    ),
    (
        "Used again later?",
        "Reuse distances, all layers; first uses left out.",
        draw_reuse,
    ),
    (
        "How large is the working set?",
        "Mean over layers, aligned windows.",
        draw_working_set,
    ),
    (
        "Does one group of experts serve a passage?",
        "Segment routing consistency: its K most used experts.",
        draw_consistency,
    ),
    (
        "Does the prompt predict the answer's experts?",
        "DAOP, equation 1, by layer.",
        draw_similarity,
    ),
    (
        "Does a layer predict the next?",
        "Mutual information of neighbouring layers' choices.",
        draw_information,
    ),
    (
        "How good are the recorded predictions?",
        "Top-r predicted against top-r true workload.",
        draw_prediction,
    ),
)
"""Title, a line of explanation and the drawing function of every figure of the page."""

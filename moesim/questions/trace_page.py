"""A trace's statistics as text, and as an HTML page: the answer first, then figures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.base.sizes import format_bytes
from moesim.reporting.figures import QUIET, new_figure, save
from moesim.reporting.figures import STRONG as LRU
from moesim.reporting.pages import (
    PageFigure,
    PageTable,
    page_figure,
    page_origin,
    trace_words,
    write_page,
)
from moesim.reporting.tables import aligned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.traces.format.reader import Trace
    from moesim.traces.stats.trace_summary import TraceSummary

_ANSWERS = {
    "yes": "Worth offloading.",
    "hardly": "Hardly worth a cache.",
    "no": "Not worth offloading.",
    "unknown": "No verdict.",
}
_SIZE_HEADS = [
    "LRU cache of",
    "experts per layer",
    "memory",
    "LRU",
    "Belady",
    "missing per step",
]


class PagePanel(NamedTuple):
    """A figure of the page under its own heading."""

    title: str
    note: str
    figure: PageFigure


def verdict_text(judgement: dict[str, Any]) -> list[str]:
    """The verdict on offloading as lines for a terminal.

    Args:
        judgement: as under ``verdict`` in a summary's figures.
    """
    lines = [_ANSWERS[judgement["answer"]], *judgement["why"]]
    if judgement["sizes"]:
        lines += ["", *aligned([_SIZE_HEADS, *_size_rows(judgement)])]
    return lines


def write_html(
    trace: Trace, summary: TraceSummary, path: Path, command: str | None = None
) -> Path:
    """Write the page of a trace, and return its path.

    Args:
        trace: opened.
        summary: its statistics.
        path: of the page.
        command: the command line that made it; None for a call from Python.
    """
    judgement = summary.figures["verdict"]
    # A trace without generated tokens has no curve, and so no sizes.
    sizes = PageTable(_SIZE_HEADS, _size_rows(judgement))
    return write_page(
        path,
        "trace.html",
        title=trace.path.name,
        origin=page_origin(command, trace=trace_words(trace.path.name, trace.digest())),
        summary=_summary_line(summary),
        answer=_ANSWERS[judgement["answer"]],
        reasons=judgement["why"],
        sizes=sizes if sizes.rows else None,
        panels=_drawn_panels(summary),
        # Names of models, files and people stay as they are written.
        provenance=json.dumps(trace.header.provenance, ensure_ascii=False, indent=1),
    )


def curve_picture(summary: TraceSummary, path: Path) -> Path:
    """Draw the hit-rate curves alone, as PNG or SVG by the end of the name.

    Raises:
        ValueError: the trace has no generated tokens.
    """
    figure = new_figure()
    if not draw_curves(figure.subplots(), summary):
        raise ValueError("no generated tokens: there is no curve to draw")
    return save(figure, path)


def _summary_line(summary: TraceSummary) -> str:
    figures = summary.figures
    shape = summary.shape
    return (
        f"{shape.name}: {shape.layers} MoE layers x {shape.experts} experts, top"
        f" {shape.top_k}; {figures['prefill_tokens']:,} prompt and"
        f" {figures['decode_tokens']:,} generated tokens, {figures['decode_steps']:,}"
        f" decode steps at batch {figures['batch']}."
    )


def _size_rows(judgement: dict[str, Any]) -> list[list[str]]:
    rows = []
    for size in judgement["sizes"]:
        at_knee = size["at"] == "knee"
        rows.append(
            [
                "the knee" if at_knee else f"{size['at']} hits",
                str(size["slots"]),
                format_bytes(size["bytes"]),
                f"{size['lru']:.1%}",
                f"{size['belady']:.1%}",
                format_bytes(round(size["copied_bytes_per_step"])),
            ]
        )
    return rows


def _drawn_panels(summary: TraceSummary) -> list[PagePanel]:
    """All panels for which the trace has data."""
    panels = []
    for title, note, draw in PANELS:
        figure = new_figure()
        axis = figure.subplots()
        if not draw(axis, summary):
            continue
        # A map of cells needs its frame; curves and bars do not.
        if not axis.images:
            axis.spines[["top", "right"]].set_visible(False)
        panels.append(PagePanel(title, note, page_figure(figure, title)))
    return panels


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

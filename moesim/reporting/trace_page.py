"""A trace's statistics as one HTML file: words first, then pictures, nothing loaded
from elsewhere.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.reporting import html as page
from moesim.reporting.figures import QUIET, new_figure, save, svg
from moesim.reporting.figures import STRONG as LRU
from moesim.reporting.text import aligned
from moesim.traces.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.traces.format.reader import Trace
    from moesim.traces.stats.trace_summary import TraceSummary as Survey

BELADY = "#d1774c"
_ANSWERS = {
    "yes": "Worth offloading.",
    "hardly": "Hardly worth a cache.",
    "no": "Not worth offloading.",
    "unknown": "No verdict.",
}


def verdict_text(verdict: dict[str, Any]) -> list[str]:
    """The verdict as lines for a terminal."""
    lines = [_ANSWERS[verdict["answer"]], *verdict["why"]]
    if verdict["sizes"]:
        lines += ["", *aligned([_HEAD, *_size_rows(verdict)])]
    return lines


_HEAD = [
    "LRU cache of",
    "experts per layer",
    "memory",
    "LRU",
    "Belady",
    "missing per step",
]


def _size_rows(verdict: dict[str, Any]) -> list[list[str]]:
    return [
        [
            "the knee" if size["at"] == "knee" else f"{size['at']} hits",
            str(size["slots"]),
            format_bytes(size["bytes"]),
            f"{size['lru']:.1%}",
            f"{size['belady']:.1%}",
            format_bytes(round(size["copied_bytes_per_step"])),
        ]
        for size in verdict["sizes"]
    ]


def write_html(trace: Trace, found: Survey, path: Path) -> Path:
    """Write the report.

    Returns:
        Its place.
    """
    figures = found.figures
    shape = found.shape
    verdict = figures["verdict"]
    head = (
        f"{shape.name}: {shape.layers} MoE layers x {shape.experts} experts, top"
        f" {shape.top_k}; {figures['prefill_tokens']:,} prompt and"
        f" {figures['decode_tokens']:,} generated tokens, {figures['decode_steps']:,}"
        f" decode steps at batch {figures['batch']}."
    )
    parts = [
        page.paragraph(head),
        page.paragraph(_ANSWERS[verdict["answer"]], "answer"),
    ]
    parts += map(page.paragraph, verdict["why"])
    if verdict["sizes"]:
        parts.append(page.table(_HEAD, _size_rows(verdict)))
    for title, words, draw in _PANELS:
        picture = _svg(draw, found)
        if picture:
            parts.append(page.section(title, words, picture))
    provenance = json.dumps(trace.header.provenance, ensure_ascii=False, indent=1)
    parts.append(page.section("Provenance", "", page.verbatim(provenance)))
    return page.write_page(path, trace.path.name, parts)


def curve_picture(found: Survey, path: Path) -> Path:
    """Draw the hit-rate curves alone, as PNG or SVG by the name's end.

    Raises:
        ValueError: the trace has no generated tokens.
    """
    figure = new_figure()
    if not _curves(figure.subplots(), found):
        raise ValueError("no generated tokens: there is no curve to draw")
    return save(figure, path)


def _svg(draw: Callable[[Any, Survey], bool], found: Survey) -> str:
    """The picture as an SVG element, or nothing where the trace has nothing to show."""
    figure = new_figure()
    axis = figure.subplots()
    if not draw(axis, found):
        return ""
    if not axis.images:
        axis.spines[["top", "right"]].set_visible(False)
    return svg(figure)


def _curves(axis: Any, found: Survey) -> bool:
    curve = found.figures["curve_decode"]
    if curve is None:
        return False
    experts = found.shape.experts
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
        shared = np.array(curve[name])[:: found.shape.layers]
        axis.plot(
            slots,
            shared,
            color=colour,
            ls=":",
            label=f"{label}, one cache for all layers",
        )
    axis.plot([0, experts], [0, 1], color=QUIET, lw=1, label="equally used experts")
    for size in found.figures["verdict"]["sizes"][:1]:
        axis.axvline(size["slots"], color=QUIET, ls="--", lw=1)
        axis.text(
            size["slots"],
            0.02,
            f" knee: {size['slots']}, {format_bytes(size['bytes'])}",
            fontsize=9,
        )
    axis.set(
        xlabel="experts cached per layer",
        ylabel="hit rate in decode",
        xlim=(0, experts),
        ylim=(0, 1.02),
    )
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    return True


def _load(axis: Any, found: Survey) -> bool:
    if not found.load.any():
        return False
    even = found.load.sum(axis=1, keepdims=True) / found.shape.experts
    ranked = -np.sort(-(found.load / np.maximum(even, 1e-9)), axis=1)
    picture = axis.imshow(
        np.minimum(ranked, 4),
        aspect="auto",
        cmap="Blues",
        interpolation="nearest",
        vmin=0,
        vmax=4,
    )
    axis.figure.colorbar(picture, ax=axis, label="load over even load (4 and more)")
    axis.set(xlabel="experts of a layer, busiest first", ylabel="layer")
    return True


def _entropy(axis: Any, found: Survey) -> bool:
    values = found.figures["entropy_bits"]
    return _per_layer(axis, values, "bits", np.log2(found.shape.experts), "even load")


def _overlap(axis: Any, found: Survey) -> bool:
    return _per_layer(
        axis,
        found.figures["overlap"],
        "share used again",
        found.figures["overlap_chance"],
        "by chance",
    )


def _similarity(axis: Any, found: Survey) -> bool:
    return _per_layer(
        axis, found.figures["similarity_by_layer"], "cosine", 1.0, "the same loads"
    )


def _information(axis: Any, found: Survey) -> bool:
    bias = found.figures["information_bias_bits"]
    return _per_layer(
        axis,
        found.figures["information_bits"],
        "bits",
        bias,
        "bias: independent layers, tokens",
    )


def _per_layer(
    axis: Any, values: list[float] | None, label: str, level: float, meaning: str
) -> bool:
    if not values:
        return False
    axis.bar(range(len(values)), values, color=LRU)
    axis.axhline(level, color=BELADY, lw=1, label=meaning)
    axis.set(xlabel="layer", ylabel=label)
    axis.legend(frameon=False, fontsize=9)
    return True


def _reuse(axis: Any, found: Survey) -> bool:
    reuse = np.array(found.figures["reuse"])
    if not reuse.sum():
        return False
    axis.bar(range(len(reuse) - 1), reuse[:-1] / reuse.sum(), color=LRU, width=1.0)
    axis.set(xlabel="other experts of the layer used since", ylabel="share of accesses")
    return True


def _window(axis: Any, found: Survey) -> bool:
    sets = found.figures["working_set_by_window"]
    if not sets:
        return False
    axis.plot([int(size) for size in sets], list(sets.values()), "o-", color=LRU)
    axis.axhline(found.shape.experts, color=QUIET, lw=1)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="window, decode steps", ylabel="distinct experts of a layer")
    return True


def _consistency(axis: Any, found: Survey) -> bool:
    drawn = {
        length: shares
        for length, shares in found.figures["consistency"].items()
        if shares
    }
    for shade, (length, shares) in enumerate(drawn.items()):
        axis.plot(shares, color=LRU, alpha=1 - 0.2 * shade, label=f"{length} tokens")
    axis.set(xlabel="layer", ylabel="choices served", ylim=(0, 1))
    if drawn:
        axis.legend(frameon=False, fontsize=9)
    return bool(drawn)


def _prediction(axis: Any, found: Survey) -> bool:
    predictors = found.figures["prediction"] or {}
    for name, told in predictors.items():
        label = (
            f"{name}, {told['depth']} ahead: {told['accuracy']:.1%}"
            if told["accuracy"] is not None
            else name
        )
        axis.plot(
            [r + 1 for r, v in enumerate(told["by_rank"]) if v is not None],
            [v for v in told["by_rank"] if v is not None],
            "o-",
            label=label,
        )
    axis.set(
        xlabel="experts of largest workload", ylabel="share foreseen", ylim=(0, 1.02)
    )
    if predictors:
        axis.legend(frameon=False, fontsize=9)
    return bool(predictors)


_PANELS: tuple[tuple[str, str, Callable[[Any, Any], bool]], ...] = (
    (
        "How large a cache?",
        (
            "Cold caches of every size, driven step by step in replay order; decode"
            " accesses."
        ),
        _curves,
    ),
    ("Who works?", "One row per layer.", _load),
    ("How evenly?", "Entropy of the load over experts.", _entropy),
    (
        "Used again at the next token?",
        "Share of a step's active experts that the step before used.",
        _overlap,
    ),
    ("Used again later?", "Reuse distances, all layers; first uses left out.", _reuse),
    ("How many work in a while?", "Mean over layers, aligned windows.", _window),
    (
        "Does one group serve a passage?",
        "Segment routing consistency: its K most used experts.",
        _consistency,
    ),
    (
        "Does the prompt tell the answer's experts?",
        "DAOP, equation 1, by layer.",
        _similarity,
    ),
    (
        "Does a layer tell the next?",
        "Mutual information of neighbouring layers' choices.",
        _information,
    ),
    (
        "Could the predictors have known?",
        "Top-r predicted against top-r true workload.",
        _prediction,
    ),
)

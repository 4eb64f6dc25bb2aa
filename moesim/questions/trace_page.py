"""A trace's statistics as text, and as an HTML page: the answer first, then figures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.units import format_bytes
from moesim.reporting.charts import (
    PALETTE,
    QUIET,
    Chart,
    channel,
    layer,
    records,
    rule,
    shown,
)
from moesim.reporting.pages import Page, PageTable, Text, page_origin, trace_words
from moesim.reporting.tables import aligned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.reporting.charts import Columns
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
    page = Page(
        f"{summary.shape.name}, no machine: is {trace.path.name} worth a cache?",
        page_origin(command, trace=trace_words(trace.path.name, trace.digest())),
        setting=[_summary_line(summary)],
        answer=_ANSWERS[judgement["answer"]],
        notes=judgement["why"],
    )
    # A trace without generated tokens has no curve, and so no sizes.
    if judgement["sizes"]:
        rows = _size_rows(judgement)
        page.add("", PageTable(_SIZE_HEADS, rows, "Hit rates at four cache sizes"))
    for title, note, draw in PANELS:
        page.add(title, draw(summary), note=note)
    # Names of models, files and people stay as they are written.
    provenance = json.dumps(trace.header.provenance, ensure_ascii=False, indent=1)
    return page.add("Provenance", Text([provenance], "folded")).write(path)


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


LRU = PALETTE[3]
BELADY = PALETTE[1]
MOST_LOAD = 4
"""Colours end at so many times the even load; few experts are beyond it."""

WIDTH = 700
HEIGHT = 260


def _chart(spec: dict[str, Any], columns: dict[str, list[Any]], label: str) -> Chart:
    size = {"width": WIDTH, "height": HEIGHT}
    return Chart({"data": {"name": "rows"}, **size, **spec}, {"rows": columns}, label)


def curves_chart(summary: TraceSummary) -> Chart | None:
    """Hit rates of LRU and Belady over the size of the cache."""
    curve = summary.figures["curve_decode"]
    if curve is None:
        return None
    experts = summary.shape.experts
    rows = []
    for name, policy in (("belady", "Belady, knows the future"), ("lru", "LRU")):
        # One cache for all layers has a point for every slot. Every L-th of them holds
        # as many experts per layer as the other curves.
        shared = curve[f"{name}_global"][:: summary.shape.layers]
        for scope, rates in (("each layer", curve[name]), ("all layers", shared)):
            rows += [
                {
                    "policy": policy,
                    "cache of": scope,
                    "slots": slots,
                    "rate": float(rate),
                }
                for slots, rate in enumerate(rates)
            ]
    colours = {"domain": ["Belady, knows the future", "LRU"], "range": [BELADY, LRU]}
    axis = channel("slots", "experts cached per layer", scale={"domain": [0, experts]})
    line = layer(
        "line",
        x=axis,
        y=channel("rate", "hit rate in decode", scale={"domain": [0, 1]}),
        color=channel("policy", None, "N", scale=colours),
        strokeDash=channel(
            "cache of",
            "cache of",
            "N",
            scale={"range": [[1, 0], [2, 3]]},
            sort="descending",
        ),
        tooltip=shown(
            ("policy", "policy"),
            ("cache of", "cache of"),
            ("slots", "experts per layer"),
            ("rate", "hit rate", ".1%"),
        ),
    )
    even = {
        "data": {"values": [{"x": 0, "y": 0}, {"x": experts, "y": 1}]},
        "mark": {"type": "line", "color": QUIET, "strokeWidth": 1},
        "encoding": {
            "x": {"field": "x", "type": "quantitative"},
            "y": {"field": "y", "type": "quantitative"},
        },
    }
    layers = [line, even]
    # The first of the sizes is the knee.
    knees = summary.figures["verdict"]["sizes"][:1]
    layers += [rule(knee["slots"], "x", color=QUIET) for knee in knees]
    label = "Hit rate over cache size; the straight line: equally used experts; the"
    return _chart({"layer": layers}, records(rows), f"{label} dashed one: the knee")


def load_chart(summary: TraceSummary) -> Chart | None:
    """Tokens per expert against an even load, busiest experts first."""
    if not summary.load.any():
        return None
    even = summary.load.sum(axis=1, keepdims=True) / summary.shape.experts
    # A layer without any decode token has no even load to divide by.
    relative = summary.load / np.maximum(even, 1e-9)
    order = np.argsort(-relative, axis=1, kind="stable")
    layers, experts = relative.shape
    columns: Columns = {
        "layer": np.repeat(np.arange(layers), experts).tolist(),
        "rank": np.tile(np.arange(1, experts + 1), layers).tolist(),
        "expert": order.ravel().tolist(),
        "tokens": np.take_along_axis(summary.load, order, axis=1).ravel().tolist(),
        "load": np.take_along_axis(relative, order, axis=1).round(3).ravel().tolist(),
    }
    label = f"load over even load ({MOST_LOAD} and more)"
    scale = {"domain": [0, MOST_LOAD], "clamp": True, "range": ["#e8eef2", LRU]}
    cells = layer(
        "rect",
        x=channel(
            "rank",
            "experts of a layer, busiest first",
            "O",
            axis={"labels": False, "ticks": False},
        ),
        y=channel("layer", "layer", "O", axis={"labelOverlap": True}),
        color=channel("load", "load", scale=scale),
        tooltip=shown(
            ("layer", "layer"),
            ("expert", "expert"),
            ("tokens", "tokens"),
            ("load", label),
        ),
    )
    return _chart(cells, columns, f"Experts by layer: {label}")


def entropy_chart(summary: TraceSummary) -> Chart | None:
    """Entropy of each layer's load."""
    bits = summary.figures["entropy_bits"]
    even = float(np.log2(summary.shape.experts))
    return _by_layer(bits, "bits", even, "even load")


def overlap_chart(summary: TraceSummary) -> Chart | None:
    """Active experts that the step before used."""
    figures = summary.figures
    chance = figures["overlap_chance"]
    return _by_layer(figures["overlap"], "share used again", chance, "by chance")


def similarity_chart(summary: TraceSummary) -> Chart | None:
    """Cosine of the loads in prefill and decode."""
    cosines = summary.figures["similarity_by_layer"]
    return _by_layer(cosines, "cosine", 1.0, "the same loads")


def information_chart(summary: TraceSummary) -> Chart | None:
    """Mutual information of neighbouring layers, and the bias of its estimate."""
    figures = summary.figures
    bias = figures["information_bias_bits"]
    meaning = "bias: independent layers, tokens"
    return _by_layer(figures["information_bits"], "bits", bias, meaning)


def _by_layer(
    values: list[float] | None, label: str, level: float, meaning: str
) -> Chart | None:
    """A bar per layer, and a line to compare them with."""
    if not values:
        return None
    columns: Columns = {"layer": list(range(len(values))), "value": values}
    bars = layer(
        "bar",
        x=channel("layer", "layer", "O", axis={"labelOverlap": True, "labelAngle": 0}),
        y=channel("value", label),
        tooltip=shown(("layer", "layer"), ("value", label, ".4g")),
    )
    parts = [bars, rule(level, color=BELADY)]
    return _chart({"layer": parts}, columns, f"By layer: {label}; the line: {meaning}")


def reuse_chart(summary: TraceSummary) -> Chart | None:
    """Distribution of reuse distances."""
    reuse = np.array(summary.figures["reuse"])
    if not reuse.sum():
        return None
    # The last entry counts first uses, which have no distance.
    shares = reuse[:-1] / reuse.sum()
    columns: Columns = {"distance": list(range(len(shares))), "share": shares.tolist()}
    axis = channel("distance", "other experts of the layer used since", "O")
    axis["axis"] = {"labelOverlap": True, "labelAngle": 0}
    bars = layer(
        "bar",
        x=axis,
        y=channel("share", "share of accesses"),
        tooltip=shown(("distance", "others since"), ("share", "share", ".2%")),
    )
    return _chart(bars, columns, "Distribution of reuse distances")


def working_set_chart(summary: TraceSummary) -> Chart | None:
    """Distinct experts over the length of a window."""
    sets = summary.figures["working_set_by_window"]
    if not sets:
        return None
    # Windows are keys of a JSON object, hence text.
    columns: Columns = {
        "window": [int(window) for window in sets],
        "experts": [*sets.values()],
    }
    scale = {"type": "log", "base": 2}
    line = layer(
        {"type": "line", "point": True},
        x=channel("window", "window, decode steps", scale=scale),
        y=channel("experts", "distinct experts of a layer"),
        tooltip=shown(
            ("window", "decode steps"), ("experts", "distinct experts", ".4g")
        ),
    )
    parts = [line, rule(summary.shape.experts, color=QUIET)]
    label = "Distinct experts over the length of a window; the line: all of a layer"
    return _chart({"layer": parts}, columns, label)


def consistency_chart(summary: TraceSummary) -> Chart | None:
    """Segment routing consistency by layer, a line for each length of segments."""
    rows = [
        {"layer": at, "share": share, "segment": f"{length} tokens"}
        for length, shares in summary.figures["consistency"].items()
        for at, share in enumerate(shares or [])
    ]
    line = layer(
        "line",
        x=channel("layer", "layer"),
        y=channel("share", "choices served", scale={"domain": [0, 1]}),
        color=channel("segment", "segments of", "N", sort=None),
        strokeDash=channel("segment", "segments of", "N", sort=None),
        tooltip=shown(
            ("segment", "segments of"), ("layer", "layer"), ("share", "served", ".1%")
        ),
    )
    return _chart(line, records(rows), "Choices served by layer") if rows else None


def prediction_chart(summary: TraceSummary) -> Chart | None:
    """Accuracy of the recorded predictions, by rank of the true workload."""
    rows = []
    for name, predictor in (summary.figures["prediction"] or {}).items():
        words = name
        if predictor["accuracy"] is not None:
            words = f"{name}, {predictor['depth']} ahead: {predictor['accuracy']:.1%}"
        # A rank that no layer step reached has no accuracy.
        rows += [
            {"rank": rank, "share": share, "predictor": words}
            for rank, share in enumerate(predictor["by_rank"], start=1)
            if share is not None
        ]
    line = layer(
        {"type": "line", "point": True},
        x=channel("rank", "experts of largest workload"),
        y=channel("share", "share predicted", scale={"domain": [0, 1]}),
        color=channel("predictor", None, "N", sort=None),
        tooltip=shown(
            ("predictor", "predictor"),
            ("rank", "experts"),
            ("share", "predicted", ".1%"),
        ),
    )
    return _chart(line, records(rows), "Share of experts predicted") if rows else None


PANELS: tuple[tuple[str, str, Callable[[TraceSummary], Chart | None]], ...] = (
    (
        "How large a cache?",
        (
            "Cold caches of every size, driven step by step in replay order; decode"
            " accesses."
        ),
        curves_chart,
    ),
    ("Which experts work?", "One row per layer.", load_chart),
    ("How evenly?", "Entropy of the load over experts.", entropy_chart),
    (
        "Used again at the next token?",
        "Share of a step's active experts that the step before used.",
        overlap_chart,
    ),
    (
        "Used again later?",
        "Reuse distances, all layers; first uses left out.",
        reuse_chart,
    ),
    (
        "How large is the working set?",
        "Mean over layers, aligned windows.",
        working_set_chart,
    ),
    (
        "Does one group of experts serve a passage?",
        "Segment routing consistency: its K most used experts.",
        consistency_chart,
    ),
    (
        "Does the prompt predict the answer's experts?",
        "DAOP, equation 1, by layer.",
        similarity_chart,
    ),
    (
        "Does a layer predict the next?",
        "Mutual information of neighbouring layers' choices.",
        information_chart,
    ),
    (
        "How good are the recorded predictions?",
        "Top-r predicted against top-r true workload.",
        prediction_chart,
    ),
)
"""Title, a line of explanation and the drawing function of every figure of the page."""

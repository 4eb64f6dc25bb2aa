"""A trace's statistics as an answer: is it worth a cache, and what its routing is
like.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.reporting.answers import Answer, Column, Listing
from moesim.reporting.figures import PALETTE, Axis, Figure
from moesim.reporting.interactive import interactive
from moesim.reporting.pages import trace_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moesim.reporting.pages import Page
    from moesim.traces.format.reader import Trace
    from moesim.traces.stats.trace_summary import TraceSummary

_ANSWERS = {
    "yes": "Worth offloading.",
    "hardly": "Hardly worth a cache.",
    "no": "Not worth offloading.",
    "unknown": "No verdict.",
}
COLUMNS = {
    "active": ("active", "{:.1f}"),
    "active in prefill": ("active_prefill", "{:.1f}"),
    "entropy, bits": ("entropy_bits", "{:.2f}"),
    "busiest": ("max_share", "{:.1%}"),
    "overlap": ("overlap", "{:.2f}"),
    "working set": ("working_set", "{:.1f}"),
    "touched": ("touched", "{:.0f}"),
}
"""Head of a column -> the figure below it, and how it is written."""


def stats_answer(trace: Trace, summary: TraceSummary) -> Answer:
    """Say whether offloading the model is worth it, and describe the routing."""
    figures = summary.figures
    shape = summary.shape
    judgement = figures["verdict"]
    chance = figures["overlap_chance"]
    # Names of models, files and people stay as they are written.
    provenance = json.dumps(trace.header.provenance, ensure_ascii=False, indent=1)
    sizes = _sizes(judgement)
    return Answer(
        question=f"is {trace.path.name} worth a cache?",
        subject=f"{shape.name}, no machine",
        setting=[
            (
                "model",
                (
                    f"{shape.name}: {shape.layers} MoE layers of {shape.experts}"
                    f" experts, top {shape.top_k}"
                ),
            ),
            (
                "trace",
                (
                    f"{figures['prefill_tokens']:,} prompt and"
                    f" {figures['decode_tokens']:,} generated tokens,"
                    f" {figures['decode_steps']:,} decode steps at batch"
                    f" {figures['batch']}; overlap by chance: {chance:.2f}"
                ),
            ),
        ],
        tables=[*sizes, _layers(figures)],
        sentences=[_ANSWERS[judgement["answer"]], *judgement["why"]],
        notes=["hit rates here are of decode accesses; `moesim hits` counts all"]
        if sizes
        else [],
        figures={
            name: (lambda draw=draw: draw(summary))
            for name, (_, _, draw) in PANELS.items()
            if draw(summary) is not None
        },
        data=figures,
        sources={"trace": trace_words(trace.path.name, trace.digest())},
        on_page=lambda page: _add_panels(page, summary),
        settings=provenance,
    )


def _add_panels(page: Page, summary: TraceSummary) -> None:
    for title, note, draw in PANELS.values():
        figure = draw(summary)
        page.add(title, None if figure is None else interactive(figure), note=note)


def _sizes(judgement: Mapping[str, Any]) -> list[Listing]:
    """Hit rates at four sizes; none for a trace without generated tokens."""
    if not judgement["sizes"]:
        return []
    rows = [
        {**size, "words": "the knee" if size["at"] == "knee" else f"{size['at']} hits"}
        for size in judgement["sizes"]
    ]
    columns = [
        Column("words", "LRU cache of"),
        Column("slots", "experts per layer"),
        Column("bytes", "memory", "bytes"),
        Column("lru", "LRU", "share", "larger"),
        Column("belady", "Belady", "share", "larger"),
        Column("copied_bytes_per_step", "missing per step", "bytes", "smaller"),
    ]
    return [Listing(pd.DataFrame(rows), columns)]


def _layers(figures: Mapping[str, Any]) -> Listing:
    """One row per layer; without decode only what prefill tells."""
    columns: dict[str, Sequence[str]] = {
        head: [form.format(value) for value in figures[key]]
        for head, (key, form) in COLUMNS.items()
        # Without decode there is no overlap of adjacent tokens, for one.
        if figures[key] is not None
    }
    for ratio, rates in figures["lru"].items():
        # A cache that a trace without decode steps cannot fill has no rates.
        if rates is not None:
            columns[f"LRU {float(ratio):.1%}"] = [f"{rate:.1%}" for rate in rates]
    rows = [
        [str(at), *cells]
        for at, cells in enumerate(zip(*columns.values(), strict=True))
    ]
    return Listing.of(["layer", *columns], rows, title="By layer")


MOST_LOAD = 4
"""Colours end at so many times the even load; few experts are beyond it."""


def curves(summary: TraceSummary) -> Figure | None:
    """Hit rates of LRU and Belady over the size of the cache."""
    curve = summary.figures["curve_decode"]
    if curve is None:
        return None
    experts = summary.shape.experts
    rows = []
    for name, policy in (("belady", "Belady"), ("lru", "LRU")):
        # One cache for all layers has a point for every slot. Every L-th of them holds
        # as many experts per layer as the other curves.
        shared = curve[f"{name}_global"][:: summary.shape.layers]
        for scope, rates in (
            ("a cache per layer", curve[name]),
            ("one for all layers", shared),
        ):
            rows += [
                (f"{policy}, {scope}", slots, float(rate))
                for slots, rate in enumerate(rates)
            ]
    # The first of the sizes is the knee.
    knees = summary.figures["verdict"]["sizes"][:1]
    return Figure(
        pd.DataFrame(rows, columns=["cache", "slots", "rate"]),
        Axis("slots", "experts cached per layer", limits=(0, experts)),
        Axis("rate", "hit rate in decode", ".0%", limits=(0, 1)),
        "Hit rate over cache size; dashed: the knee, and caches that see the future",
        series="cache",
        marked=False,
        dashed=frozenset(row[0] for row in rows if "Belady" in row[0]),
        rules=[("x", knee["slots"], "knee") for knee in knees],
        lines=[((0, experts), (0, 1), "equally used experts")],
    )


def load(summary: TraceSummary) -> Figure | None:
    """Tokens per expert against an even load, busiest experts first."""
    if not summary.load.any():
        return None
    even = summary.load.sum(axis=1, keepdims=True) / summary.shape.experts
    # A layer without any decode token has no even load to divide by.
    relative = summary.load / np.maximum(even, 1e-9)
    order = np.argsort(-relative, axis=1, kind="stable")
    layers, experts = relative.shape
    rows = pd.DataFrame(
        {
            "layer": np.repeat(np.arange(layers), experts),
            "rank": np.tile(np.arange(1, experts + 1), layers),
            "expert": order.ravel(),
            "tokens": np.take_along_axis(summary.load, order, axis=1).ravel(),
            "load": np.take_along_axis(relative, order, axis=1).round(3).ravel(),
        }
    )
    return Figure(
        rows,
        Axis("rank", "experts of a layer, busiest first", integer=True),
        Axis("layer", "layer", integer=True),
        f"Experts by layer: load over an even load ({MOST_LOAD} and more)",
        mark="cells",
        colour=Axis("load", "load over even load", limits=(0, MOST_LOAD)),
        shades=("#e8eef2", PALETTE[3]),
        hover=[("expert", "expert", ""), ("tokens", "tokens", "")],
    )


def _by_layer(
    key: str, words: str, level: Callable[[Mapping[str, Any]], float], meaning: str
) -> Callable[[TraceSummary], Figure | None]:
    """A bar per layer, and a line to compare them with."""

    def draw(summary: TraceSummary) -> Figure | None:
        values = summary.figures[key]
        if not values:
            return None
        rows = pd.DataFrame({"layer": range(len(values)), "value": values})
        return Figure(
            rows,
            Axis("layer", "layer", integer=True),
            Axis("value", words, zero=True),
            f"By layer: {words}; dashed: {meaning}",
            mark="bar",
            rules=[
                ("y", level(summary.figures | {"E": summary.shape.experts}), meaning)
            ],
        )

    return draw


def reuse(summary: TraceSummary) -> Figure | None:
    """Distribution of reuse distances."""
    counts = np.array(summary.figures["reuse"])
    if not counts.sum():
        return None
    # The last entry counts first uses, which have no distance.
    shares = counts[:-1] / counts.sum()
    return Figure(
        pd.DataFrame({"distance": range(len(shares)), "share": shares}),
        Axis("distance", "other experts of the layer used since", integer=True),
        Axis("share", "share of accesses", ".0%", zero=True),
        "Distribution of reuse distances",
        mark="bar",
    )


def working_set(summary: TraceSummary) -> Figure | None:
    """Distinct experts over the length of a window."""
    sizes = summary.figures["working_set_by_window"]
    if not sizes:
        return None
    rows = pd.DataFrame({"window": map(int, sizes), "experts": sizes.values()})
    return Figure(
        rows.dropna(),
        Axis("window", "window, decode steps", log=True),
        Axis("experts", "distinct experts of a layer", zero=True),
        "Distinct experts over the length of a window; dashed: all of a layer",
        rules=[("y", summary.shape.experts, "all of a layer")],
    )


def consistency(summary: TraceSummary) -> Figure | None:
    """Segment routing consistency by layer, a line for each length of segments."""
    rows = [
        (at, share, f"{length} tokens")
        for length, shares in summary.figures["consistency"].items()
        for at, share in enumerate(shares or [])
    ]
    if not rows:
        return None
    return Figure(
        pd.DataFrame(rows, columns=["layer", "share", "segments of"]),
        Axis("layer", "layer", integer=True),
        Axis("share", "choices served", ".0%", limits=(0, 1)),
        "Choices served by a segment's most used experts, by layer",
        series="segments of",
    )


def prediction(summary: TraceSummary) -> Figure | None:
    """Accuracy of the recorded predictions, by rank of the true workload."""
    rows = []
    for name, predictor in (summary.figures["prediction"] or {}).items():
        words = name
        if predictor["accuracy"] is not None:
            words = f"{name}, {predictor['depth']} ahead: {predictor['accuracy']:.1%}"
        # A rank that no layer step reached has no accuracy.
        rows += [
            (rank, share, words)
            for rank, share in enumerate(predictor["by_rank"], start=1)
            if share is not None
        ]
    if not rows:
        return None
    return Figure(
        pd.DataFrame(rows, columns=["rank", "share", "predictor"]),
        Axis("rank", "experts of largest workload", integer=True),
        Axis("share", "share predicted", ".0%", limits=(0, 1)),
        "Share of experts predicted",
        series="predictor",
    )


PANELS: dict[str, tuple[str, str, Callable[[TraceSummary], Figure | None]]] = {
    "curves": (
        "How large a cache?",
        "Caches of every size that begin empty, in replay order; decode accesses.",
        curves,
    ),
    "load": ("Which experts work?", "One row per layer.", load),
    "entropy": (
        "How evenly?",
        "Entropy of the load over experts.",
        _by_layer(
            "entropy_bits", "bits", lambda f: float(np.log2(f["E"])), "even load"
        ),
    ),
    "overlap": (
        "Used again at the next token?",
        "Share of a step's active experts that the step before used.",
        _by_layer(
            "overlap", "share used again", lambda f: f["overlap_chance"], "by chance"
        ),
    ),
    "reuse": (
        "Used again later?",
        "Reuse distances, all layers; first uses left out.",
        reuse,
    ),
    "working_set": (
        "How large is the working set?",
        "Mean over layers, aligned windows.",
        working_set,
    ),
    "consistency": (
        "Does one group of experts serve a passage?",
        "Segment routing consistency: its K most used experts.",
        consistency,
    ),
    "similarity": (
        "Does the prompt predict the answer's experts?",
        "Cosine of the loads in prompt and answer (DAOP, equation 1), by layer.",
        _by_layer("similarity_by_layer", "cosine", lambda _: 1.0, "the same loads"),
    ),
    "information": (
        "Does a layer predict the next?",
        "Mutual information of neighbouring layers' choices.",
        _by_layer(
            "information_bits",
            "bits",
            lambda f: f["information_bias_bits"],
            "bias: independent layers, tokens",
        ),
    ),
    "prediction": (
        "How good are the recorded predictions?",
        "Top-r predicted against top-r true workload.",
        prediction,
    ),
}
"""By name: title, a line of explanation and the drawing function of every figure."""

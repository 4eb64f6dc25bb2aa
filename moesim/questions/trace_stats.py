"""A trace's statistics as an answer: is it worth a cache, and what its routing is
like.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.base.units import percent
from moesim.reporting.answers import Answer
from moesim.reporting.figures import PALETTE, Axis, Figure
from moesim.reporting.parts import Column, Listing, trace_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moesim.traces.format.reader import Trace
    from moesim.traces.stats.trace_summary import TraceSummary

_ANSWERS = {
    "yes": "Worth a cache.",
    "hardly": "Hardly worth a cache.",
    "no": "Not worth a cache.",
    "unknown": "No verdict.",
}
COLUMNS = (
    Column("active", "active"),
    Column("active_prefill", "active in prefill"),
    Column("entropy_bits", "entropy, bits"),
    Column("max_share", "busiest", "share"),
    Column("overlap", "overlap", "share"),
    Column("working_set", "working set"),
    Column("touched", "touched"),
)
"""Figures of each layer."""
MOST_LOAD = 4
"""Colours end at so many times the even load; few experts are beyond it."""

LAYER = Axis("layer", "layer", integer=True)


def stats_answer(trace: Trace, summary: TraceSummary) -> Answer:
    """Say whether offloading the model is worth it, and describe the routing."""
    figures = summary.figures
    shape = summary.shape
    judgement = figures["verdict"]
    name = Path(trace.name).name
    tokens = (
        f"{figures['prefill_tokens']:,} prompt and {figures['decode_tokens']:,}"
        f" generated tokens, {figures['decode_steps']:,} decode steps at batch"
        f" {figures['batch']}; overlap by chance: {percent(figures['overlap_chance'])}"
    )
    model = f"{shape.layers} MoE layers of {shape.experts} experts, top {shape.top_k}"
    sizes = _sizes(judgement)
    drawn = {name: draw(summary) for name, draw in FIGURES.items()}
    return Answer(
        question=f"is {name} worth a cache?",
        subject=f"{shape.name}, no machine",
        setting=[("model", f"{shape.name}: {model}"), ("trace", tokens)],
        tables=[*sizes, _layers(figures)],
        sentences=[_ANSWERS[judgement["answer"]], *judgement["why"]],
        notes=["hit rates here are of decode accesses; `moesim hits` counts all"]
        if sizes
        else [],
        figures={
            each: (lambda figure=figure: figure)
            for each, figure in drawn.items()
            if figure is not None
        },
        data=figures,
        sources={"trace": trace_words(name, trace.digest())},
        # Names of models, files and people stay as they are written.
        settings=json.dumps(trace.header.provenance, ensure_ascii=False, indent=1),
    )


def _sizes(judgement: Mapping[str, Any]) -> list[Listing]:
    """Hit rates at four sizes; none for a trace without generated tokens."""
    if not judgement["sizes"]:
        return []
    rows = [{**size, "words": _sized(size["at"])} for size in judgement["sizes"]]
    columns = [
        Column("words", "LRU cache of"),
        Column("slots", "experts per layer"),
        Column("bytes", "memory", "bytes"),
        Column("lru", "LRU", "share"),
        Column("belady", "Belady", "share"),
        Column("copied_bytes_per_step", "missing per step", "bytes"),
    ]
    return [Listing(pd.DataFrame(rows), columns)]


def _sized(goal: str) -> str:
    """How a cache was sized, in words."""
    return "where LRU bends" if goal == "knee" else goal.replace("%", " % hits")


def _layers(figures: Mapping[str, Any]) -> Listing:
    """One row per layer; without decode only what prefill tells."""
    # Without decode there is no overlap of adjacent tokens, for one.
    columns = [each for each in COLUMNS if figures[each.name] is not None]
    frame = pd.DataFrame({each.name: figures[each.name] for each in columns})
    for ratio, rates in figures["lru"].items():
        # A cache that a trace without decode steps cannot fill has no rates.
        if rates is not None:
            frame[f"lru {ratio}"] = rates
            head = f"LRU {percent(float(ratio))}"
            columns.append(Column(f"lru {ratio}", head, "share"))
    frame.insert(0, "layer", range(len(frame)))
    return Listing(frame, [Column("layer", "layer"), *columns], title="By layer")


def curves(summary: TraceSummary) -> Figure | None:
    """Hit rates of LRU and Belady over the size of the cache."""
    curve = summary.figures["curve_decode"]
    if curve is None:
        return None
    shape = summary.shape
    rows = []
    for name, policy in (("belady", "Belady"), ("lru", "LRU")):
        # One cache for all layers has a point for every slot. Every L-th of them holds
        # as many experts per layer as the other curves.
        of_scope = {
            "a cache per layer": curve[name],
            "one for all layers": curve[f"{name}_global"][:: shape.layers],
        }
        for scope, rates in of_scope.items():
            cache = f"{policy}, {scope}"
            rows += [(cache, slots, float(rate)) for slots, rate in enumerate(rates)]
    # The first of the sizes is the knee.
    knees = summary.figures["verdict"]["sizes"][:1]
    return Figure(
        pd.DataFrame(rows, columns=["cache", "slots", "rate"]),
        Axis("slots", "experts cached per layer", limits=(0, shape.experts)),
        Axis("rate", "hit rate in decode", ".0%", limits=(0, 1)),
        "Hit rate over the size of a cache that begins empty; dashed: the bend, and"
        " caches that see the future",
        series="cache",
        marked=False,
        dashed=frozenset(row[0] for row in rows if "Belady" in row[0]),
        rules=[("x", knee["slots"], "bend of LRU") for knee in knees],
        lines=[((0, shape.experts), (0, 1), "equally used experts")],
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
        LAYER,
        f"Experts by layer: load over an even load ({MOST_LOAD} and more)",
        mark="cells",
        colour=Axis("load", "load over even load", limits=(0, MOST_LOAD)),
        shades=("#e8eef2", PALETTE[3]),
        hover=[("expert", "expert", ""), ("tokens", "tokens", "")],
    )


def _by_layer(
    key: str,
    words: str,
    label: str,
    level: Callable[[TraceSummary], float],
    meaning: str,
) -> Callable[[TraceSummary], Figure | None]:
    """A bar for each layer, and a line at a level to compare with."""

    def draw(summary: TraceSummary) -> Figure | None:
        values = summary.figures[key]
        if not values:
            return None
        return Figure(
            pd.DataFrame({"layer": range(len(values)), "value": values}),
            LAYER,
            Axis("value", words, zero=True),
            f"{label}, by layer; dashed: {meaning}",
            mark="bar",
            rules=[("y", level(summary), meaning)],
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
        Axis(
            "distance",
            "other experts of the layer used since",
            integer=True,
            limits=(-0.5, len(shares) - 0.5),
        ),
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
        LAYER,
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
            words = (
                f"{name}, {predictor['depth']} ahead: {percent(predictor['accuracy'])}"
            )
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


FIGURES: dict[str, Callable[[TraceSummary], Figure | None]] = {
    "curves": curves,
    "load": load,
    "entropy": _by_layer(
        "entropy_bits",
        "bits",
        "Entropy of the load over experts",
        lambda summary: float(np.log2(summary.shape.experts)),
        "even load",
    ),
    "overlap": _by_layer(
        "overlap",
        "share used again",
        "Share of a step's active experts that the step before used",
        lambda summary: summary.figures["overlap_chance"],
        "by chance",
    ),
    "reuse": reuse,
    "working_set": working_set,
    "consistency": consistency,
    "similarity": _by_layer(
        "similarity_by_layer",
        "cosine",
        "Cosine of the loads in prompt and answer",
        lambda _: 1.0,
        "the same loads",
    ),
    "information": _by_layer(
        "information_bits",
        "bits",
        "Mutual information of neighbouring layers' choices",
        lambda summary: summary.figures["information_bias_bits"],
        "what independent layers would show",
    ),
    "prediction": prediction,
}
"""What draws each figure; None where the trace lacks what it shows."""

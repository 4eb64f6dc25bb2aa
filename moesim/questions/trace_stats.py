"""A trace's statistics as an answer: is it worth a cache, and what its routing is
like.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.base.units import percent
from moesim.reporting.answers import Answer
from moesim.reporting.figures import PALETTE, Axis, Figure
from moesim.reporting.parts import Column, Listing, trace_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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

LAYER = Axis("at", "layer", integer=True)


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
    return Answer(
        question=f"is {name} worth a cache?",
        subject=f"{shape.name}, no machine",
        setting=[("model", f"{shape.name}: {model}"), ("trace", tokens)],
        tables=[*sizes, _layers(figures)],
        sentences=[_ANSWERS[judgement["answer"]], *judgement["why"]],
        notes=["hit rates here are of decode accesses; `moesim hits` counts all"]
        if sizes
        else [],
        figures=stats_figures(summary),
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


def stats_figures(summary: TraceSummary) -> dict[str, Figure]:
    """The figures that a trace has something to show in."""
    facts = summary.figures
    experts = summary.shape.experts
    share = Axis("value", "share of accesses", ".0%", zero=True)
    reuse = np.array(facts["reuse"])
    sizes = facts["working_set_by_window"] or {}
    figures = {
        "curves": _curves(summary),
        "load": _load(summary),
        "entropy": _by_layer(
            facts["entropy_bits"],
            "bits",
            "Entropy of the load over experts",
            float(np.log2(experts)),
            "even load",
        ),
        "overlap": _by_layer(
            facts["overlap"],
            "share used again",
            "Share of a step's active experts that the step before used",
            facts["overlap_chance"],
            "by chance",
            ".0%",
        ),
        "reuse": Figure(
            # The last entry counts first uses, which have no distance.
            _values({"": reuse[:-1] / max(1, reuse.sum())} if reuse.any() else {}),
            Axis(
                "at",
                "slots per layer that LRU needs, less one",
                integer=True,
                limits=(-0.5, len(reuse) - 1.5),
            ),
            share,
            "Distribution of reuse distances",
            mark="bar",
        ),
        "working_set": Figure(
            _values({"": sizes.values()}, at=map(int, sizes)),
            Axis("at", "window, decode steps", log=True),
            Axis("value", "distinct experts of a layer", zero=True),
            "Distinct experts over the length of a window; dashed: all of a layer",
            rules=[("y", experts, "all of a layer")],
        ),
        "similarity": _by_layer(
            facts["similarity_by_layer"],
            "cosine",
            "Cosine of the loads in prompt and answer",
            1.0,
            "the same loads",
        ),
        "information": _by_layer(
            facts["information_bits"],
            "bits",
            "Mutual information of neighbouring layers' choices",
            facts["information_bias_bits"],
            "what independent layers would show",
        ),
        "prediction": Figure(
            _values(
                {
                    _predictor(name, each): [None, *each["by_rank"]]
                    for name, each in (facts["prediction"] or {}).items()
                }
            ),
            Axis("at", "experts of largest workload", integer=True),
            replace(share, words="share predicted", limits=(0, 1)),
            "Share of experts predicted",
            series="of",
        ),
    }
    return {name: figure for name, figure in figures.items() if len(figure.rows)}


def _values(series: Mapping[str, Any], at: Iterable[int] | None = None) -> pd.DataFrame:
    """Values of several series ``of`` a name, each ``at`` its place or at those given;
    without those that are missing.
    """
    index = None if at is None else list(at)
    columns = {
        name: pd.Series([] if values is None else list(values), index, float)
        for name, values in series.items()
    }
    frame = pd.DataFrame(columns).rename_axis("at").reset_index()
    return frame.melt("at", var_name="of").dropna()


def _by_layer(
    values: Sequence[float | None] | None,
    words: str,
    label: str,
    level: float | None,
    meaning: str,
    form: str = "",
) -> Figure:
    """A bar for each layer, and a line at a level to compare with."""
    return Figure(
        _values({"": values}),
        LAYER,
        Axis("value", words, form, zero=True),
        f"{label}, by layer; dashed: {meaning}",
        mark="bar",
        rules=[] if level is None else [("y", level, meaning)],
    )


def _predictor(name: str, predictor: Mapping[str, Any]) -> str:
    if predictor["accuracy"] is None:
        return name
    return f"{name}, {predictor['depth']} ahead: {percent(predictor['accuracy'])}"


def _curves(summary: TraceSummary) -> Figure:
    """Hit rates of LRU and Belady over the size of the cache."""
    layers, experts = summary.shape.layers, summary.shape.experts
    curve = summary.figures["curve_decode"] or {}
    rates = {}
    for name, rates_of in sorted(curve.items()):
        policy, _, is_global = name.partition("_")
        # One cache for all layers has a point for every slot. Every L-th of them holds
        # as many experts per layer as the other curves.
        scope = "one for all layers" if is_global else "a cache per layer"
        policy = {"lru": "LRU", "belady": "Belady"}.get(policy, policy)
        rates[f"{policy}, {scope}"] = rates_of[:: layers if is_global else 1]
    # The first of the sizes is the knee.
    knees = summary.figures["verdict"]["sizes"][:1]
    return Figure(
        _values(rates),
        Axis("at", "experts cached per layer", limits=(0, experts)),
        Axis("value", "hit rate in decode", ".0%", limits=(0, 1)),
        "Hit rate over the size of a cache that begins empty; vertical: where LRU"
        " bends; grey: equally used experts",
        series="of",
        dashed=frozenset(name for name in rates if "Belady" in name),
        rules=[("x", knee["slots"], "bend of LRU") for knee in knees],
        lines=[((0, experts), (0, 1), "equally used experts")],
    )


def _load(summary: TraceSummary) -> Figure:
    """Tokens per expert against an even load, busiest experts first."""
    tokens = pd.DataFrame(summary.load).rename_axis("at").reset_index()
    rows = tokens.melt("at", var_name="expert", value_name="tokens")
    of_layer = rows.groupby("at")["tokens"]
    ranks = of_layer.rank(method="first", ascending=False).astype(int)
    load = (rows["tokens"] / of_layer.transform("mean")).round(3)
    return Figure(
        # A layer without any decode token has no even load to divide by.
        rows.assign(rank=ranks, load=load).dropna(),
        Axis("rank", "experts of a layer, busiest first", integer=True),
        LAYER,
        f"Experts by layer: load over an even load ({MOST_LOAD} and more)",
        mark="cells",
        colour=Axis("load", "load over even load", limits=(0, MOST_LOAD)),
        shades=("#e8eef2", PALETTE[3]),
        hover=[("expert", "expert", ""), ("tokens", "tokens", "")],
    )

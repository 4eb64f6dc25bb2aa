"""Runs as charts and as a page: what every lane did at any moment, which expert was
where, and how it went on over the tokens.

A comparison's page has the same parts, with a choice of the run that each one shows.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pandas as pd

from moesim.base.units import ms, percent
from moesim.questions.replay import lane_rows, run_facts, shared_setting
from moesim.questions.timeline import (
    packed,
    step_choice,
    step_figure,
    steps_to_show,
    timeline_part,
)
from moesim.reporting.charts import (
    DEVICES,
    Chart,
    Styles,
    channel,
    columns_of,
    layer,
    shown,
)
from moesim.reporting.pages import (
    Choice,
    Facts,
    Page,
    PageTable,
    Spans,
    Text,
    page_origin,
    trace_words,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from moesim.runs.result import Run

__all__ = ["placement_figure", "step_figure", "write_run"]

MOST_POINTS = 400
"""Points of a line: more of them are averaged, since they could not be told apart."""

_MEASURES = [
    ("on_gpu", "share of its uses that a GPU computed"),
    ("resident", "share of its uses for which it was resident"),
]


def write_run(run: Run, path: Path, command: str | None = None) -> Path:
    """Write the page of a run.

    Args:
        run: with its timeline, and its bound where there is one.
        path: of the page.
        command: the command line that made it; None for a call from Python.

    Returns:
        The same path.
    """
    config = run.config
    runs = {"run": run}
    policy = config["options"]["policy"]
    page = Page(
        f"{config['model']} on {config['hw']}: what {policy} was worth",
        origin_of(runs, command),
        setting=shared_setting(runs).split("\n"),
        answer=_answer(run),
    )
    if run.bound is not None:
        page.notes = [f"bound: {run.bound.words(run.metrics['makespan_s'])}"]
    heads, *rows = lane_rows(run)
    names, values = zip(*run_facts(run), strict=True)
    facts = Facts("", names, {"": values})
    lanes = PageTable(heads, rows, "What every lane did")
    page.add("", facts)
    page.add(
        "What limits it?",
        lanes,
        note="The lane that works most of the time limits the speed; a compute lane"
        " stalls while it waits for copies.",
    )
    add_runs(page, runs)
    page.add_warnings(run.warnings)
    page.add("Settings", Text([json.dumps(config, indent=1)], "folded"))
    return page.write(path)


def _answer(run: Run) -> str:
    metrics = run.metrics
    first = f"first token after {ms(metrics['ttft_s'])}"
    if metrics["decode_tokens_per_s"] is None:
        return first
    return (
        f"{metrics['decode_tokens_per_s']:.3g} tokens/s, {first};"
        f" {percent(metrics['hit_rate_active'])} of active experts were hits"
    )


def origin_of(runs: Mapping[Any, Run], command: str | None) -> list[tuple[str, str]]:
    """The head of a page about runs of one trace."""
    config = next(iter(runs.values())).config
    trace = trace_words(config["trace"], config["trace_digest"])
    return page_origin(command, trace=trace)


def add_runs(page: Page, runs: Mapping[str, Run]) -> Page:
    """Add timelines, placement and the course of the runs to a page.

    Args:
        page: with choices ``policy`` and ``other`` made here if there are several runs.
        runs: by policy, in the order in which they are offered; of one trace on one
            machine.
    """
    first = next(iter(runs.values()))
    steps = steps_to_show(list(runs.values()))
    # A run without any step did nothing that could be drawn.
    if not steps:
        return page
    names = list(runs)
    several = len(names) > 1
    choices = _choices(names) if several else []
    page.add(
        "When did every lane do what?",
        *choices,
        step_choice(first, steps),
        *_timelines(runs, steps, [choice.name for choice in choices]),
        note="Copies run beside the work they are for; a pause on a lane is time lost."
        + _left_out(first, steps),
    )
    page.add(
        "Which expert where, computed by whom?",
        Choice("measure", "colour shows", _MEASURES, "on_gpu"),
        *(placement_chart(runs, choice.name) for choice in choices),
        None if several else placement_chart(runs, None),
        note="A cell for each expert, a row for each layer, busiest to the left."
        " Hover for the expert and its counts.",
    )
    return page.add(
        "How does it go on over the tokens?",
        course_chart(runs, "duration_ms", "ms per forward pass", "Time of each pass"),
        course_chart(
            runs, "hits", "hit rate", "Hit rate of active experts in each pass"
        ),
        note="Decode only."
        + (" The two chosen policies stand out." if several else ""),
    )


def _choices(names: Sequence[str]) -> list[Choice]:
    options = [(name, name) for name in names]
    return [
        Choice("policy", "policy", options, names[0]),
        Choice("other", "compared with", options, names[1]),
    ]


def _timelines(
    runs: Mapping[str, Run], steps: Sequence[int], choices: Sequence[str]
) -> list[Spans]:
    data = {name: packed(run, steps) for name, run in runs.items()}
    lanes = list(
        dict.fromkeys(lane for each in data.values() for lane in each["lanes"])
    )
    if not choices:
        return [timeline_part(data, lanes)]
    # Both read the same operations; the page holds them once.
    return [
        timeline_part(data if place == 0 else {}, lanes, name)
        for place, name in enumerate(choices)
    ]


def _left_out(run: Run, steps: Sequence[int]) -> str:
    count = int(run.metrics["steps"])
    if len(steps) == count:
        return ""
    return f" {len(steps)} of {count} forward passes fit this page."


def placements(runs: Mapping[str, Run]) -> pd.DataFrame:
    """Where every expert was: rows of `Run.placement`, with ``policy`` and ``rank``
    among the experts of its layer, busiest first.
    """
    parts = []
    for name, run in runs.items():
        part = run.placement()
        by_layer = part.groupby("layer")["uses"]
        rank = by_layer.rank(method="first", ascending=False)
        parts.append(part.assign(policy=name, rank=rank.astype(int)))
    return pd.concat(parts, ignore_index=True)


def placement_figure(run: Run) -> Chart:
    """Draw which expert was computed where: a cell per expert, a row per layer, busiest
    experts to the left.

    Blue was computed on a GPU, orange on the CPU, grey in between; what is empty was
    never asked for.
    """
    return placement_chart({"run": run}, None)


def placement_chart(runs: Mapping[str, Run], choice: str | None) -> Chart:
    """Where the experts of a run were; of the run that is chosen, if there are several.

    Args:
        runs: by name.
        choice: the parameter that names the run; None for the only one.
    """
    frame = placements(runs)
    numbers = frame.round({"on_gpu": 3, "resident": 3})
    filters = [{"filter": f"datum.policy == {choice}"}] if choice else []
    params = [{"name": "measure", "value": "on_gpu"}]
    if choice:
        names = list(runs)
        initial = names[0] if choice == "policy" or len(names) < 2 else names[1]
        params.append({"name": choice, "value": initial})
    layers = int(frame["layer"].max()) + 1 if len(frame) else 1
    experts = int(frame["rank"].max()) if len(frame) else 1
    cells = layer(
        {"type": "rect", "strokeOpacity": 0},
        x=channel(
            "rank",
            "experts of a layer, busiest first",
            "O",
            scale={"domain": list(range(1, experts + 1)), "padding": 0},
            axis={"labels": False, "ticks": False},
        ),
        y=channel(
            "layer",
            "layer",
            "O",
            scale={"domain": list(range(layers)), "padding": 0},
            axis={"labelOverlap": True},
        ),
        color=channel(
            "shown",
            "share",
            scale={"domain": [0, 0.5, 1], "range": list(DEVICES)},
            legend={"format": ".0%", "gradientLength": 160},
        ),
        tooltip=shown(
            ("layer", "layer"),
            ("expert", "expert"),
            ("uses", "uses"),
            ("tokens", "tokens"),
            ("on_gpu", "computed on a GPU", ".1%"),
            ("resident", "resident when used", ".1%"),
        ),
    )
    spec = {
        "data": {"name": "cells"},
        "params": params,
        "transform": [*filters, {"calculate": "datum[measure]", "as": "shown"}],
        "width": 800,
        "height": min(max(9 * layers, 60), 360),
        **({"title": {"text": {"expr": choice}}} if choice else {}),
        **cells,
    }
    label = "Experts by layer: blue on the GPU, orange on the CPU"
    return Chart(spec, {"cells": columns_of(numbers)}, label)


def course(run: Run) -> pd.DataFrame:
    """Time and hit rate of every decode pass of a run: ``step``, ``duration_ms``,
    ``hits``. Neighbours are averaged where there are more than `MOST_POINTS`.
    """
    steps = run.timeline.step_frame()
    accesses = run.timeline.access_frame()
    hits = (accesses["state"] == "hit").groupby(accesses["step"]).mean()
    decode = steps[steps["phase"] == "decode"]
    table = pd.DataFrame(
        {
            "step": decode["step"].to_numpy(),
            "duration_ms": 1e3 * (decode["end_s"] - decode["start_s"]).to_numpy(),
            "hits": hits.reindex(decode["step"]).to_numpy(),
        }
    )
    each = -(-len(table) // MOST_POINTS) or 1
    groups = table.index // each
    averaged: pd.DataFrame = table.groupby(groups).mean()
    return averaged.round({"step": 0, "duration_ms": 4, "hits": 4})


def course_chart(runs: Mapping[str, Run], column: str, title: str, label: str) -> Chart:
    """A figure of every decode pass, a line for each run; those that are chosen stand
    out.
    """
    frame = pd.concat(
        [course(run).assign(policy=name) for name, run in runs.items()],
        ignore_index=True,
    )
    styles = Styles(list(runs), oracles_of(runs))
    several = len(runs) > 1
    is_chosen = "datum.policy == policy || datum.policy == other"
    names = [*runs, *runs][:2]
    legend = {"orient": "top", "columns": 4} if several else None
    line = layer(
        "line",
        x=channel("step", "forward pass"),
        y=channel(column, title, scale={"zero": column == "hits"}),
        color=styles.colour(legend=legend),
        strokeDash=styles.dash(legend=legend),
        opacity={"condition": {"test": is_chosen, "value": 1}, "value": 0.25},
        tooltip=shown(
            ("policy", "policy"),
            ("step", "forward pass"),
            ("duration_ms", "ms", ".3f"),
            ("hits", "hit rate", ".1%"),
        ),
    )
    spec = {
        "data": {"name": "course"},
        "params": [
            {"name": "policy", "value": names[0]},
            {"name": "other", "value": names[1]},
        ],
        "width": 800,
        "height": 200,
        **line,
    }
    return Chart(spec, {"course": columns_of(frame)}, label)


def oracles_of(runs: Mapping[str, Run]) -> frozenset[str]:
    """Names of the runs whose policies see the future."""
    return frozenset(name for name, run in runs.items() if run.config["oracle"])

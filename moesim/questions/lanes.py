"""What runs did, for pages: every lane at any moment, which expert was where, and each
decode pass. A page of several runs shows two of them under each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from moesim.base.options import ConfigError
from moesim.questions.timeline import KINDS, packed, step_choice, steps_to_show
from moesim.reporting.figures import Axis, Figure
from moesim.reporting.parts import Choice, Section, Shown, Spans

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.runs.result import Run

MOST_POINTS = 400
"""Points of a line: more of them are averaged, since they could not be told apart."""


def run_sections(runs: Mapping[str, Run]) -> list[Section]:
    """Timelines, placement and the course of runs, for a page.

    Args:
        runs: by policy, in the order in which they are offered; of one trace on one
            machine.
    """
    first = next(iter(runs.values()))
    steps = steps_to_show(list(runs.values()))
    # A run without any step did nothing that could be drawn.
    if not steps:
        return []
    choices = []
    if len(runs) > 1:
        options = [(name, name) for name in runs]
        choices = [
            Choice("policy", "policy", options, options[0][0]),
            Choice("other", "compared with", options, options[1][0]),
        ]
    note = "Copies run beside the work they are for; a pause on a lane is time lost."
    count = int(first.metrics["steps"])
    if len(steps) < count:
        note += (
            f" The page holds {len(steps)} of the {count} forward passes: the first and"
            " those from the middle on."
        )
    data = {name: packed(run, steps) for name, run in runs.items()}
    lanes = list(
        dict.fromkeys(lane for each in data.values() for lane in each["lanes"])
    )
    # Both timelines read the same operations; the page holds them once.
    timelines = [
        Spans(lanes, KINDS, {} if place else data, choice.name)
        for place, choice in enumerate(choices)
    ]
    placed = placement_drawn(
        pd.concat(
            [run.placement().assign(policy=name) for name, run in runs.items()],
            ignore_index=True,
        )
    )
    places = [Shown(placed, {"policy": choice}) for choice in choices]
    return [
        Section(
            "When did every lane do what?",
            [
                *choices,
                step_choice(first, steps),
                *(timelines or [Spans(lanes, KINDS, data)]),
            ],
            note,
        ),
        Section(
            "Which expert where, computed by whom?",
            places or [placed],
            "A cell for each expert, a row for each layer, busiest to the left.",
        ),
        Section(
            "Every decode pass",
            [course_drawn(runs)],
            "A click on a name hides it." if choices else "",
        ),
    ]


_MEASURES = (
    Axis("on_gpu", "computed by a GPU", ".0%", limits=(0, 1)),
    Axis("resident", "resident when used", ".0%", limits=(0, 1)),
)


def placement_drawn(placed: pd.DataFrame) -> Figure:
    """Where experts were: a cell per expert, a row per layer, busiest to the left.

    Args:
        placed: columns of `Run.placement`; ``policy`` where there are several runs.
    """
    by = ["layer"] if "policy" not in placed else ["policy", "layer"]
    rows = placed.round({"on_gpu": 3, "resident": 3})
    if "uses" in rows:
        rank = rows.groupby(by)["uses"].rank(method="first", ascending=False)
    else:
        rank = rows["expert"]
    more = [(name, name, "") for name in ("uses", "tokens") if name in rows]
    return Figure(
        rows.assign(rank=rank.astype(int)),
        Axis(
            "rank", "experts of a layer, busiest first" if "uses" in rows else "expert"
        ),
        Axis("layer", "layer", integer=True),
        "Experts by layer: blue on the GPU, orange on the CPU",
        mark="cells",
        colour=_MEASURES[0],
        measures=_MEASURES,
        hover=[("expert", "expert", ""), ("resident", "resident", ".1%"), *more],
    )


def course(run: Run) -> pd.DataFrame:
    """Time and hit rate of every decode pass of a run: ``step``, ``ms``, ``hits``.

    Neighbours are averaged where there are more than `MOST_POINTS`.
    """
    steps = run.timeline.step_frame()
    accesses = run.timeline.access_frame()
    hits = (accesses["state"] == "hit").groupby(accesses["step"]).mean()
    decode = steps[steps["phase"] == "decode"]
    table = pd.DataFrame(
        {
            "step": decode["step"].to_numpy(),
            "ms": 1e3 * (decode["end_s"] - decode["start_s"]).to_numpy(),
            "hits": hits.reindex(decode["step"]).to_numpy(),
        }
    )
    each = -(-len(table) // MOST_POINTS) or 1
    averaged: pd.DataFrame = table.groupby(table.index // each).mean()
    return averaged.round({"step": 0, "ms": 4, "hits": 4})


def course_drawn(runs: Mapping[str, Run]) -> Figure:
    """Every decode pass, a line for each run: its ``ms``, or ``hits``."""
    if not runs:
        raise ConfigError("runs: expected at least one run, got none")
    rows = pd.concat(
        [course(run).assign(policy=name) for name, run in runs.items()],
        ignore_index=True,
    )
    ms = Axis("ms", "ms per forward pass")
    return Figure(
        rows,
        Axis("step", "forward pass", integer=True),
        ms,
        "Every decode pass",
        series="policy",
        measures=(ms, Axis("hits", "hit rate", ".0%", zero=True)),
        dashed=frozenset(n for n, run in runs.items() if run.config["oracle"]),
    )

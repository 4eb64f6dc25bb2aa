"""What runs did: every operation, why it was done and what it waited for; which expert
was where. A page of several runs shows two of them under each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.base.units import format_bytes, ms
from moesim.policies.base import PolicyError
from moesim.reporting.figures import CPU, GPU, Axis, Figure, names
from moesim.reporting.parts import Choice, Section, Shown, Spans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.runs.result import Run

MOST_SPANS = 120_000
"""Operations that a page holds: more would make it larger than 5 MB."""

NS_PER_S = 1e9

KINDS = {
    "dense": "#8fa3ae",
    "plan": "#777777",
    "compute": GPU,
    "compute on CPU": CPU,
    "fetch": "#E69F00",
    "prefetch": "#56B4E9",
    "replace": "#CC79A7",
    "read": "#009E73",
    "activation": "#b9a88f",
    "join": "#c9c9c9",
}
"""Colours of the kinds of operations."""

_REASONS = {
    "hit": "its weights were resident",
    "delayed": "its weights were on their way",
    "miss": "its weights were missing",
    "fetch": "the layer waits for it",
    "prefetch": "expected to be needed soon",
    "replace": "the cache asked for it",
    "read": "from SSD into host memory",
}
"""Why a copy was made, by its kind; why a GPU computed, by the state of its access."""


def spans_of(run: Run, steps: Sequence[int] | None = None) -> pd.DataFrame:
    """The operations of a run with what a reader asks about each.

    Args:
        run: with its timeline.
        steps: forward passes; None for all.

    Returns:
        A row per operation in the order of their starts: the columns of a timeline;
        ``start`` and ``end`` in nanoseconds; ``shown``, one of `KINDS`; ``reason``, in
        words; and ``cause``: how many rows earlier the operation stands whose end let
        this one start, 0 for none.
    """
    spans = run.timeline.frame().astype({"lane": str, "kind": str})
    if steps is not None:
        spans = spans[spans["step"].isin(steps)]
    spans = spans.sort_values(["start_s", "end_s"], kind="stable", ignore_index=True)
    ends = (NS_PER_S * spans[["start_s", "end_s"]]).round().astype(np.int64)
    spans[["start", "end"]] = ends
    computes = spans["kind"] == "compute"
    on_cpu = spans["lane"] == "cpu"
    spans["shown"] = spans["kind"].mask(computes & on_cpu, "compute on CPU")

    keys = ["step", "layer", "expert"]
    accesses = run.timeline.access_frame()[[*keys, "state"]].astype({"state": str})
    states = spans[keys].merge(accesses, on=keys, how="left")["state"]
    on_gpu = spans["lane"].str.startswith("gpu")
    reasons = spans["kind"].mask(computes & on_gpu, states)
    spans["reason"] = reasons.map(_REASONS).fillna("")
    spans["cause"] = _causes(spans)
    return spans


def _causes(spans: pd.DataFrame) -> np.ndarray:
    """Which operation ended at the instant at which each one started.

    The copy of the same expert is preferred, then work of the same layer step, then
    what its own lane did before.
    """
    same = ["step", "layer", "expert", "lane"]
    table = spans[[*same, "start", "end"]].rename_axis("row").reset_index()
    pairs = table.merge(table, left_on="start", right_on="end", suffixes=("", "_by"))
    pairs = pairs[pairs["row_by"] < pairs["row"]]
    step, layer, expert, lane = (pairs[name] == pairs[f"{name}_by"] for name in same)
    copied = expert & layer & (pairs["expert"] >= 0)
    pairs["rank"] = 4 * copied + 2 * (step & layer) + lane
    order = ["row", "rank", "row_by"]
    best = pairs.sort_values(order, ascending=[True, False, True])
    best = best.drop_duplicates("row")
    causes = np.zeros(len(spans), int)
    causes[best["row"]] = best["row"] - best["row_by"]
    return causes


def packed(run: Run, steps: Sequence[int]) -> dict[str, Any]:
    """The operations of some forward passes as a page carries them: columns of whole
    numbers, starts as differences, nanoseconds; words by their places in lists.
    """
    spans = spans_of(run, steps)
    passes = run.timeline.step_frame().set_index("step").loc[list(steps)]
    ends = (NS_PER_S * passes[["start_s", "end_s"]]).round().astype(np.int64)
    columns: dict[str, Any] = {
        "layer": spans["layer"].tolist(),
        "expert": spans["expert"].tolist(),
        "start": np.diff(spans["start"], prepend=0).tolist(),
        "length": (spans["end"] - spans["start"]).tolist(),
        "cause": spans["cause"].tolist(),
        "steps": ends.reset_index().to_numpy().tolist(),
    }
    sizes = spans["bytes"].map(lambda size: format_bytes(int(size)) if size else "")
    words = {
        ("lane", "lanes"): spans["lane"],
        ("kind", "kinds"): spans["shown"],
        ("bytes", "sizes"): sizes,
        ("reason", "reasons"): spans["reason"],
    }
    for (column, listed), values in words.items():
        places, known = pd.factorize(values)
        columns |= {column: places.tolist(), listed: known.tolist()}
    return columns


def steps_to_show(runs: Sequence[Run]) -> list[int]:
    """Forward passes that fit a page: all, or the first prefill and a row of passes
    from the middle on, the same of every run.
    """
    steps = runs[0].timeline.step_frame()
    if steps.empty:
        return []
    each = pd.concat([run.timeline.frame()["step"] for run in runs])
    counts = each.value_counts().reindex(steps["step"], fill_value=0)
    if counts.sum() > MOST_SPANS:
        first = counts[:1][counts[:1] < MOST_SPANS // 2]
        later = counts.loc[middle_step(steps) :]
        room = later.cumsum() <= MOST_SPANS - first.sum()
        room.iloc[0] = True
        counts = pd.concat([first, later[room]])
    return sorted(set(map(int, counts.index)))


def middle_step(steps: pd.DataFrame) -> int:
    """The decode step in the middle; a prefill step where nothing is generated."""
    decode = steps[steps["phase"] == "decode"]
    candidates = decode if len(decode) else steps
    return int(candidates["step"].iloc[len(candidates) // 2])


def step_drawn(run: Run, step: int | None = None, layers: int = 4) -> Figure:
    """What every lane did in the first layers of one forward pass, with the numbers of
    the experts it was for.

    Args:
        run: with its timeline.
        step: the forward pass; None takes the decode step in the middle of the run.
        layers: how many MoE layers from the first on.

    Raises:
        PolicyError: no such step.
    """
    steps = run.timeline.step_frame()
    if step is None and len(steps):
        step = middle_step(steps)
    rows = steps[steps["step"] == step]
    if rows.empty:
        raise PolicyError(
            f"step: expected one of the run's {len(steps)} forward passes, got {step}"
        )
    begin_s, end_s = rows[["start_s", "end_s"]].to_numpy(float)[0]
    spans = spans_of(run, [int(rows["step"].iloc[0])])
    # Layer -1 is what follows the last layer, the output head.
    spans = spans[(spans["layer"] >= 0) & (spans["layer"] < layers)]
    lanes = [lane for lane in run.timeline.lanes if (spans["lane"] == lane).any()]
    ends_ms = 1e3 * (spans[["start_s", "end_s"]] - begin_s)
    length_ms = ends_ms["end_s"] - ends_ms["start_s"]
    expert = spans["expert"].astype(str).where(spans["expert"] >= 0, "")
    # A number that is wider than its bar would run into the next one.
    fits = length_ms > expert.str.len() * ends_ms["end_s"].max() * 0.014
    took = ms(end_s - begin_s)
    return Figure(
        spans.assign(
            start=ends_ms["start_s"], end=ends_ms["end_s"], label=expert.where(fits, "")
        ),
        Axis("end", f"ms since the start of forward pass {step}, of {took} in all"),
        names("lane", "", lanes),
        "What every lane did; the numbers are those of experts",
        mark="bar",
        series="shown",
        colours=KINDS,
        start="start",
        text="label",
    )


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
    rows = first.timeline.step_frame()
    rows = rows[rows["step"].isin(steps)]
    took = [ms(seconds) for seconds in rows["end_s"] - rows["start_s"]]
    passes = [
        (str(step), f"{step}: {phase}, {tokens} token{'s' * (tokens > 1)}, {time}")
        for step, phase, tokens, time in zip(
            rows["step"], rows["phase"], rows["tokens"], took, strict=True
        )
    ]
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
    used = {lane for each in data.values() for lane in each["lanes"]}
    lanes = [lane for lane in first.timeline.lanes if lane in used]
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
                Choice("step", "forward pass", passes, str(middle_step(rows))),
                *(timelines or [Spans(lanes, KINDS, data)]),
            ],
            note,
        ),
        Section(
            "Which expert where, computed by whom?",
            places or [placed],
            "A cell for each expert, a row for each layer, busiest to the left.",
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

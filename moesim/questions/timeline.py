"""Timelines of runs for pages and notebooks: every operation, why it was done, and what
it waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.base.units import format_bytes, ms
from moesim.policies.base import PolicyError
from moesim.reporting.figures import CPU, GPU, Axis, Figure, names
from moesim.reporting.parts import Choice

if TYPE_CHECKING:
    from collections.abc import Sequence

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

_REASONS = (
    "",
    "its weights were resident",
    "its weights were on their way",
    "its weights were missing",
    "the layer waits for it",
    "expected to be needed soon",
    "the cache asked for it",
    "from SSD into host memory",
)
_OF_STATE = {"hit": 1, "delayed": 2, "miss": 3}
_OF_KIND = {"fetch": 4, "prefetch": 5, "replace": 6, "read": 7}


def spans_of(run: Run, steps: Sequence[int] | None = None) -> pd.DataFrame:
    """The operations of a run with what a reader asks about each.

    Args:
        run: with its timeline.
        steps: forward passes; None for all.

    Returns:
        A row per operation in the order of their starts: the columns of a timeline,
        ``reason`` (index into the reasons that pages print), and ``cause``: how many
        rows earlier the operation stands whose end let this one start, 0 for none.
    """
    spans = run.timeline.frame()
    if steps is not None:
        spans = spans[spans["step"].isin(steps)]
    spans = spans.sort_values(["start_s", "end_s"], kind="stable", ignore_index=True)
    return spans.assign(reason=_reasons(run, spans), cause=_causes(spans))


def _reasons(run: Run, spans: pd.DataFrame) -> np.ndarray:
    kind = spans["kind"].astype(str)
    accesses = run.timeline.access_frame()
    keys = ["step", "layer", "expert"]
    states = accesses[keys].assign(state=accesses["state"].astype(str).map(_OF_STATE))
    of_expert = spans[keys].merge(states, on=keys, how="left")["state"]
    on_gpu = spans["lane"].astype(str).str.startswith("gpu")
    reasons = kind.map(_OF_KIND).mask((kind == "compute") & on_gpu, of_expert)
    return reasons.fillna(0).astype(int).to_numpy()


def _causes(spans: pd.DataFrame) -> np.ndarray:
    """Which operation ended at the instant at which each one started.

    The copy of the same expert is preferred, then work of the same layer step, then
    what its own lane did before.
    """
    table = spans[["step", "layer", "expert"]].assign(
        lane=spans["lane"].astype(str),
        row=np.arange(len(spans)),
        start=np.rint(spans["start_s"] * NS_PER_S),
        end=np.rint(spans["end_s"] * NS_PER_S),
    )
    pairs = table.merge(table, left_on="start", right_on="end", suffixes=("", "_by"))
    pairs = pairs[pairs["row_by"] < pairs["row"]]
    lane, step, layer, expert = (
        pairs[name] == pairs[f"{name}_by"]
        for name in ("lane", "step", "layer", "expert")
    )
    copied = expert & layer & (pairs["expert"] >= 0)
    rank = 4 * copied + 2 * (step & layer) + lane
    order = ["row", "rank", "row_by"]
    pairs = pairs.assign(rank=rank).sort_values(order, ascending=[True, False, True])
    best = pairs.drop_duplicates("row")
    causes = np.zeros(len(spans), int)
    causes[best["row"]] = best["row"] - best["row_by"]
    return causes


def packed(run: Run, steps: Sequence[int]) -> dict[str, Any]:
    """The operations of some forward passes as a page carries them: columns of whole
    numbers, starts as differences, nanoseconds.
    """
    spans = spans_of(run, steps)
    starts = np.rint(spans["start_s"] * NS_PER_S).astype(np.int64).to_numpy()
    ends = np.rint(spans["end_s"] * NS_PER_S).astype(np.int64).to_numpy()
    sizes, which = np.unique(spans["bytes"], return_inverse=True)
    kinds = list(KINDS)
    lanes = [lane for lane in run.timeline.lanes if (spans["lane"] == lane).any()]
    ends_of_steps = run.timeline.step_frame().set_index("step").loc[list(steps)]
    ends_of_steps = (NS_PER_S * ends_of_steps[["start_s", "end_s"]]).round()
    return {
        "lanes": lanes,
        "kinds": kinds,
        "lane": spans["lane"].astype(str).map(lanes.index).tolist(),
        "kind": _kind_names(spans).map(kinds.index).tolist(),
        "layer": spans["layer"].tolist(),
        "expert": spans["expert"].tolist(),
        "start": np.diff(starts, prepend=0).tolist(),
        "length": (ends - starts).tolist(),
        "sizes": [format_bytes(int(size)) if size else "" for size in sizes],
        "bytes": which.tolist(),
        "reasons": _REASONS,
        "reason": spans["reason"].tolist(),
        "cause": spans["cause"].tolist(),
        "steps": ends_of_steps.astype(int).reset_index().to_numpy().tolist(),
    }


def _kind_names(spans: pd.DataFrame) -> pd.Series:
    names = spans["kind"].astype(str)
    on_cpu = (names == "compute") & (spans["lane"].astype(str) == "cpu")
    return names.mask(on_cpu, "compute on CPU")


def steps_to_show(runs: Sequence[Run]) -> list[int]:
    """Forward passes that fit a page: all, or the first prefill and a row of passes
    from the middle on, the same of every run.
    """
    steps = runs[0].timeline.step_frame()
    if steps.empty:
        return []
    each = pd.concat([run.timeline.frame()["step"] for run in runs])
    counts = each.value_counts().reindex(steps["step"], fill_value=0)
    if counts.sum() <= MOST_SPANS:
        return [int(step) for step in steps["step"]]

    middle = list(steps["step"]).index(middle_step(steps))
    first = int(steps["step"].iloc[0])
    chosen = [first] if counts[first] < MOST_SPANS // 2 else []
    left = MOST_SPANS - sum(int(counts[step]) for step in chosen)
    for step in map(int, steps["step"].iloc[middle:]):
        left -= int(counts[step])
        if left < 0 and len(chosen) > 1:
            break
        chosen.append(step)
    return sorted(set(chosen))


def middle_step(steps: pd.DataFrame) -> int:
    """The decode step in the middle; a prefill step where nothing is generated."""
    decode = steps[steps["phase"] == "decode"]
    candidates = decode if len(decode) else steps
    return int(candidates["step"].iloc[len(candidates) // 2])


def step_choice(run: Run, steps: Sequence[int]) -> Choice:
    """A choice of the forward passes that a page holds, with how long they took."""
    rows = run.timeline.step_frame()
    rows = rows[rows["step"].isin(steps)]
    options = []
    for row in rows.to_dict("records"):
        took = ms(row["end_s"] - row["start_s"])
        tokens = f"{row['tokens']} token{'s' if row['tokens'] > 1 else ''}"
        words = f"{row['step']}: {row['phase']}, {tokens}, {took}"
        options.append((str(row["step"]), words))
    return Choice("step", "forward pass", options, str(middle_step(rows)))


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
    begin_s = float(rows["start_s"].iloc[0])
    whole_s = float(rows["end_s"].iloc[0]) - begin_s
    spans = spans_of(run, [int(rows["step"].iloc[0])])
    # Layer -1 is what follows the last layer, the output head.
    spans = spans[(spans["layer"] >= 0) & (spans["layer"] < layers)]
    lanes = [lane for lane in run.timeline.lanes if (spans["lane"] == lane).any()]
    starts_ms = 1e3 * (spans["start_s"] - begin_s)
    ends_ms = 1e3 * (spans["end_s"] - begin_s)
    shown_ms = float(ends_ms.max()) if len(spans) else 0.0
    expert = spans["expert"].astype(str).where(spans["expert"] >= 0, "")
    # A number that is wider than its bar would run into the next one.
    fits = (ends_ms - starts_ms) > expert.str.len() * shown_ms * 0.014
    drawn = pd.DataFrame(
        {
            "lane": spans["lane"].astype(str),
            "kind": _kind_names(spans),
            "start": starts_ms,
            "end": ends_ms,
            "label": expert.where(fits, ""),
        }
    )
    return Figure(
        drawn,
        Axis(
            "end", f"ms since the start of forward pass {step}, of {ms(whole_s)} in all"
        ),
        names("lane", "", lanes),
        "What every lane did; the numbers are those of experts",
        mark="span",
        series="kind",
        colours=KINDS,
        start="start",
        text="label",
    )

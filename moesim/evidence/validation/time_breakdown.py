"""Splits the seconds of a run into terms that add up to its makespan, step by step.

A layer step is a chain: dense part, planning, work of the lanes, join. What lies
between the links belongs to the waking of threads and the handing out of work. Two runs
of the same trial can be compared term by term, and the term that differs most is what a
better model must look at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from moesim.hwprofiles.schema import REFERENCE_TERMS

if TYPE_CHECKING:
    from moesim.traces.timeline.spans import Timeline

TERMS = REFERENCE_TERMS
"""The terms; profiles keep those of reference runs under the same names."""


def terms(timeline: Timeline) -> dict[str, float]:
    """Return seconds of each of `TERMS`; their sum is the makespan."""
    by_step = terms_by_step(timeline)
    return {name: float(seconds.sum()) for name, seconds in by_step.items()}


def terms_by_step(timeline: Timeline) -> dict[str, np.ndarray]:
    """Return seconds of each of `TERMS` in each forward pass, from the end of the one
    before to its own: float64 [steps].

    ``lanes`` is from the end of a layer step's planning to the end of its last
    operation; ``between`` is all the rest: the request for a plan, the join, and waking
    the device.
    """
    spans = timeline.frame()
    passes = timeline.step_frame().set_index("step")
    seconds = spans["end_s"] - spans["start_s"]
    kind = spans["kind"]
    # One after another on one lane, so their seconds simply add up.
    by_term = {
        name: seconds[kind == of].groupby(spans["step"]).sum()
        for name, of in (("dense", "dense"), ("planning", "plan"))
    }

    # Prefetches are not waited for, and the head's span belongs to no layer.
    work = kind.isin(("compute", "fetch", "read")) & (spans["layer"] >= 0)
    last_s, plan_end_s = (
        spans[chosen].groupby(["step", "layer"])["end_s"].max()
        for chosen in (work, kind == "plan")
    )
    worked_s = (last_s - plan_end_s).clip(lower=0.0)
    by_term["lanes"] = worked_s.groupby("step").sum()

    # Whatever is left of a step; so the terms add up by construction.
    table = pd.DataFrame(by_term, passes.index).fillna(0.0)
    first_s = passes["start_s"].iloc[0]
    steps_s = np.diff(passes["end_s"], prepend=first_s)
    table["between"] = steps_s - table.sum(axis=1)
    return {name: table[name].to_numpy() for name in TERMS}


def step_seconds(timeline: Timeline) -> np.ndarray:
    """Return seconds from each step's end to the next one's, float64 [steps - 1]: the
    gaps of which TPOT is the mean.
    """
    return np.diff(timeline.step_frame()["end_s"])

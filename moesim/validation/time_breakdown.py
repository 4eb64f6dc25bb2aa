"""Splits the seconds of a run into terms that add up to its makespan, step by step.

A layer step is a chain: dense part, planning, work of the lanes, join. What lies
between the links belongs to the waking of threads and the handing out of work. Two runs
of the same trial can be compared term by term, and the term that differs most is what a
better model must look at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.hwprofiles.schema import REFERENCE_TERMS
from moesim.traces.timeline.spans import COMPUTE, DENSE, FETCH, PLAN, READ

if TYPE_CHECKING:
    from moesim.traces.timeline.spans import Timeline

TERMS = REFERENCE_TERMS
"""The terms; profiles keep those of reference runs under the same names."""


def terms(timeline: Timeline) -> dict[str, float]:
    """Return seconds of each of `TERMS`; their sum is the makespan."""
    return {
        name: float(seconds.sum()) for name, seconds in terms_by_step(timeline).items()
    }


def terms_by_step(timeline: Timeline) -> dict[str, np.ndarray]:
    """Return seconds of each of `TERMS` in each forward pass, from the end of the one
    before to its own: float64 [steps].

    ``lanes`` is from the end of a layer step's planning to the end of its last
    operation; ``between`` is all the rest: the request for a plan, the join, and waking
    the device.
    """
    spans = _columns(timeline, ("kind", "step", "layer", "start_s", "end_s"))
    passes = list(timeline.step_chunks())
    steps = np.concatenate([chunk["step"] for chunk in passes])
    begin_s = np.concatenate([chunk["start_s"] for chunk in passes])
    ends_s = np.concatenate([chunk["end_s"] for chunk in passes])
    count = len(steps)
    # Row of each span in the table of steps, whatever number the first step has.
    row = np.searchsorted(steps, spans["step"])
    seconds = spans["end_s"] - spans["start_s"]

    by_term: dict[str, np.ndarray] = {}
    for name, kind in (("dense", DENSE), ("planning", PLAN)):
        # One after another on one lane, so their seconds simply add up.
        chosen = spans["kind"] == kind
        by_term[name] = np.bincount(row[chosen], seconds[chosen], count)
    by_term["lanes"] = _lanes_s(spans, row, count)

    # Whatever is left of a step; so the terms add up by construction.
    steps_s = np.diff(ends_s, prepend=begin_s[0])
    by_term["between"] = steps_s - sum(by_term.values())
    return {name: by_term[name] for name in TERMS}


def _columns(timeline: Timeline, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    chunks = list(timeline.chunks())
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in names}


def _lanes_s(spans: dict[str, np.ndarray], row: np.ndarray, count: int) -> np.ndarray:
    """Seconds from planning to the last operation, summed over layers: float64
    [steps].
    """
    kind = spans["kind"]
    layer = spans["layer"]
    layers = int(layer.max()) + 1
    layer_step = row * layers + layer

    # Prefetches are not waited for, and the head's span belongs to no layer.
    planned = kind == PLAN
    work = np.isin(kind, (COMPUTE, FETCH, READ)) & (layer >= 0)
    plan_end_s = np.full(count * layers, np.inf)
    plan_end_s[layer_step[planned]] = spans["end_s"][planned]
    last_s = np.full(count * layers, -np.inf)
    np.maximum.at(last_s, layer_step[work], spans["end_s"][work])

    # Layer steps without plan or work come out below zero.
    worked_s = np.maximum(last_s - plan_end_s, 0.0)
    return np.asarray(worked_s.reshape(count, layers).sum(axis=1))


def step_seconds(timeline: Timeline) -> np.ndarray:
    """Return seconds from each step's end to the next one's, float64 [steps - 1]: the
    gaps of which TPOT is the mean.
    """
    ends_s = np.concatenate([chunk["end_s"] for chunk in timeline.step_chunks()])
    return np.diff(ends_s)

"""Where the seconds of a run went: terms that add up to its makespan, step by step.

A layer step is a chain: dense part, planning, work of the lanes, join. What lies
between the links belongs to the waking of threads and the handing out of work. Two runs
of the same trial can be compared term by term, and the term that differs most is what a
better model must look at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.timeline.spans import COMPUTE, DENSE, FETCH, PLAN, READ

if TYPE_CHECKING:
    from moesim.traces.timeline.spans import Timeline

TERMS = ("dense", "planning", "lanes", "between")


def terms(timeline: Timeline) -> dict[str, float]:
    """Seconds of each of `TERMS`; their sum is the makespan."""
    return {
        name: float(seconds.sum()) for name, seconds in terms_by_step(timeline).items()
    }


def terms_by_step(timeline: Timeline) -> dict[str, np.ndarray]:
    """Seconds of each of `TERMS` in each forward pass, from the end of the one before
    to its own: float64 [steps].

    ``lanes`` is from the end of a layer step's planning to the end of its last
    operation; ``between`` is all the rest: the request for a plan, the join, and waking
    the device.
    """
    chunks = list(timeline.chunks())
    columns = {
        name: np.concatenate([chunk[name] for chunk in chunks])
        for name in ("kind", "step", "layer", "start_s", "end_s")
    }
    kind, layer, start_s, end_s = (
        columns[name] for name in ("kind", "layer", "start_s", "end_s")
    )
    passes = list(timeline.step_chunks())
    steps, begin_s, ends_s = (
        np.concatenate([chunk[name] for chunk in passes])
        for name in ("step", "start_s", "end_s")
    )
    row = np.searchsorted(steps, columns["step"])
    found: dict[str, np.ndarray] = {
        name: np.bincount(
            row[kind == code], (end_s - start_s)[kind == code], len(steps)
        )
        for name, code in (("dense", DENSE), ("planning", PLAN))
    }
    layers = int(layer.max()) + 1
    place = row * layers + layer
    planned = kind == PLAN
    work = np.isin(kind, (COMPUTE, FETCH, READ)) & (layer >= 0)
    plan_end_s = np.full(len(steps) * layers, np.inf)
    last_s = np.full(len(steps) * layers, -np.inf)
    plan_end_s[place[planned]] = end_s[planned]
    np.maximum.at(last_s, place[work], end_s[work])
    found["lanes"] = (
        np.maximum(last_s - plan_end_s, 0.0).reshape(len(steps), layers).sum(axis=1)
    )
    found["between"] = np.diff(ends_s, prepend=begin_s[0]) - sum(found.values())
    return {name: found[name] for name in TERMS}


def step_seconds(timeline: Timeline) -> np.ndarray:
    """Seconds from each step's end to the next one's, float64 [steps - 1]: the gaps of
    which TPOT is the mean.
    """
    ends_s = np.concatenate([chunk["end_s"] for chunk in timeline.step_chunks()])
    return np.diff(ends_s)

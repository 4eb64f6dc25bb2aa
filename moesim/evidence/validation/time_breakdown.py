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
    from collections.abc import Iterable

    from moesim.traces.timeline.spans import Chunk, Timeline

TERMS = REFERENCE_TERMS
"""The terms; profiles keep those of reference runs under the same names."""

_SPAN_COLUMNS = ("kind", "step", "layer", "start_s", "end_s")
_STEP_COLUMNS = ("step", "start_s", "end_s")


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
    spans = _columns(timeline.chunks(), _SPAN_COLUMNS)
    passes = _columns(timeline.step_chunks(), _STEP_COLUMNS)
    count = len(passes["step"])
    # Row of each span in the table of steps, whatever number the first step has.
    row = np.searchsorted(passes["step"], spans["step"])
    seconds = spans["end_s"] - spans["start_s"]

    by_term: dict[str, np.ndarray] = {}
    for name, kind in (("dense", DENSE), ("planning", PLAN)):
        # One after another on one lane, so their seconds simply add up.
        chosen = spans["kind"] == kind
        by_term[name] = np.bincount(row[chosen], seconds[chosen], count)
    by_term["lanes"] = _lanes_s(spans, row, count)

    # Whatever is left of a step; so the terms add up by construction.
    first_s = passes["start_s"][0]
    steps_s = np.diff(passes["end_s"], prepend=first_s)
    by_term["between"] = steps_s - sum(by_term.values())
    return {name: by_term[name] for name in TERMS}


def _columns(chunks: Iterable[Chunk], names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Join the chunks of a table, column by column."""
    parts = list(chunks)
    columns = {}
    for name in names:
        columns[name] = np.concatenate([part[name] for part in parts])
    return columns


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
    by_layer_s = worked_s.reshape(count, layers)
    return np.asarray(by_layer_s.sum(axis=1))


def step_seconds(timeline: Timeline) -> np.ndarray:
    """Return seconds from each step's end to the next one's, float64 [steps - 1]: the
    gaps of which TPOT is the mean.
    """
    passes = _columns(timeline.step_chunks(), _STEP_COLUMNS)
    return np.diff(passes["end_s"])

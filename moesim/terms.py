"""Where the seconds of a run went: terms that add up to its makespan, and each lane's busy time.

A layer step is a chain: dense part, planning, work of the lanes, join. What lies between the links belongs to the
waking of threads and the handing out of work. Two runs of the same trial can be compared term by term, and the term
that differs most is what a better model must look at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from traces.timeline import COMPUTE, DENSE, FETCH, PLAN, READ

if TYPE_CHECKING:
    from traces.timeline import Timeline

TERMS = ("dense", "planning", "lanes", "between")


def terms(timeline: Timeline) -> dict[str, float]:
    """Seconds of each of `TERMS`; their sum is the makespan.

    ``lanes`` is from the first operation of a layer step to the last end; ``between`` is all the rest: the join, waking
    and handing out, which the simulator charges as one.
    """
    chunks = list(timeline.chunks())
    columns = {
        name: np.concatenate([chunk[name] for chunk in chunks])
        for name in ("kind", "step", "layer", "start_s", "end_s")
    }  # fmt: skip
    kind, start_s, end_s = columns["kind"], columns["start_s"], columns["end_s"]
    found = {
        name: float((end_s - start_s)[kind == code].sum())
        for name, code in (("dense", DENSE), ("planning", PLAN))
    }  # fmt: skip
    work = np.isin(kind, (COMPUTE, FETCH, READ)) & (columns["layer"] >= 0)
    place = columns["step"][work] * (int(columns["layer"].max()) + 1) + columns["layer"][work]
    _, group = np.unique(place, return_inverse=True)
    count = int(group.max(initial=-1)) + 1
    first_s, last_s = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(first_s, group, start_s[work])
    np.maximum.at(last_s, group, end_s[work])
    found["lanes"] = float((last_s - first_s).sum())
    found["between"] = float(end_s.max() - start_s.min()) - sum(found.values())
    return {name: found[name] for name in TERMS}


def step_seconds(timeline: Timeline) -> np.ndarray:
    """Seconds from each step's end to the next one's, float64 [steps - 1]: the gaps of which TPOT is the mean."""
    ends_s = np.concatenate([chunk["end_s"] for chunk in timeline.step_chunks()])
    return np.diff(ends_s)

"""Caches that replace experts on their own account: a base that admits no fetched
expert, and the pairing of missed experts with residents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.machine_code.functions import compiled
from moesim.policies.base import RESIDENT
from moesim.policies.cache._kernels import mark_keys
from moesim.policies.compiled import CompiledCache
from moesim.policies.kernels import (
    MOVED,
    REPLACEMENTS,
    CacheKernels,
    State,
    Work,
    admits_nothing,
    state,
)

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.base import RunContext


# What the first row of marks says of an expert.
_OUTSIDE = 0
_INSIDE = 1
_PAIRED = 2


class NoAdmissionCache(CompiledCache):
    """Admits nothing: what is fetched or prefetched runs from staging and is gone
    afterwards. A subclass may be empty, or have fixed content (`initial`).
    """

    def bring(self, context: RunContext) -> CacheKernels:
        """Refuse all."""
        del context
        return CacheKernels(state(), admits=admits_nothing)


@compiled(MOVED)
def note_admitted(state: State, keys: np.ndarray) -> None:
    """Note in the first row of marks what has entered."""
    mark_keys(state.marks[0], keys, 1)


@compiled(MOVED)
def note_evicted(state: State, keys: np.ndarray) -> None:
    """Note in the first row of marks what has left."""
    mark_keys(state.marks[0], keys, 0)


@compiled(REPLACEMENTS)
def replace_by_missed(
    state: State,
    work: Work,
    states: np.ndarray,
    outgoing: np.ndarray,
    incoming: np.ndarray,
) -> int:
    """Pair a layer's missed experts with its residents (`pair_missed`)."""
    return pair_missed(state, work, False, states, outgoing, incoming)


@compiled
def _best_absent(state: State, work: Work, everyone: bool) -> int:
    score = state.scores[0]
    marks = state.marks[0]
    first = work.layer * state.integers[0]
    best = -1
    if everyone:
        for key in range(first, first + state.integers[0]):
            if marks[key] == _OUTSIDE and (best < 0 or score[key] > score[best]):
                best = key
        return best
    for expert in work.experts:
        key = first + expert
        if marks[key] == _OUTSIDE and (best < 0 or score[key] > score[best]):
            best = key
    return best


@compiled
def _worst_resident(state: State, work: Work, states: np.ndarray) -> int:
    score = state.scores[0]
    first = work.layer * state.integers[0]
    worst = -1
    for key in range(first, first + state.integers[0]):
        may_leave = state.marks[0, key] == _INSIDE and states[key] == RESIDENT
        if may_leave and (worst < 0 or score[key] < score[worst]):
            worst = key
    return worst


@compiled
def pair_missed(
    state: State,
    work: Work,
    everyone: bool,
    states: np.ndarray,
    outgoing: np.ndarray,
    incoming: np.ndarray,
) -> int:
    """Pair the best of a layer's missed experts, or of all that are absent, with the
    worst of its residents, while that pays.

    The state's first row of scores ranks them, its first row of marks says what is
    inside, its last number is the margin, and its first integer E.
    """
    score = state.scores[0]
    marks = state.marks[0]
    count = 0
    while True:
        best = _best_absent(state, work, everyone)
        worst = _worst_resident(state, work, states)
        # Both only get closer: once a pair does not pay, none does.
        if best < 0 or worst < 0 or not score[best] > score[worst] + state.numbers[-1]:
            break
        outgoing[count] = worst
        incoming[count] = best
        count += 1
        marks[worst] = _PAIRED
        marks[best] = _PAIRED
    for n in range(count):
        marks[outgoing[n]] = _INSIDE
        marks[incoming[n]] = _OUTSIDE
    return count

"""Caches that replace experts on their own account: a base that admits no fetched
expert, and the pairing of missed experts with residents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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
    from moesim.policies.base import RunContext


class NoAdmissionCache(CompiledCache):
    """Admits nothing: what is fetched or prefetched runs from staging and is gone
    afterwards. A subclass may be empty, or have fixed content (`initial`).
    """

    def bring(self, context: RunContext) -> CacheKernels:
        """Refuse all."""
        del context
        return CacheKernels(state(), admits=admits_nothing)


@compiled
def pair_missed(
    scores: np.ndarray,
    experts: np.ndarray,
    inside: np.ndarray,
    settled: np.ndarray,
    margin: float,
    outgoing: np.ndarray,
    incoming: np.ndarray,
) -> int:
    """Pair the best of the missed with the worst of the residents, while that pays.

    Args:
        scores: float64 [E] of a layer.
        experts: int32 [A], active.
        inside, settled: bool [E], what the cache has, and what has arrived of it.
        margin: by which a newcomer must beat whom it replaces.
        outgoing, incoming: int64, results: experts.

    Returns:
        The number of pairs.
    """
    left = settled.copy()
    missed = np.zeros(len(scores), np.bool_)
    for expert in experts:
        missed[expert] = not inside[expert]
    count = 0
    while True:
        best = -1
        worst = -1
        for expert in range(len(scores)):
            if missed[expert] and (best < 0 or scores[expert] > scores[best]):
                best = expert
            if left[expert] and (worst < 0 or scores[expert] < scores[worst]):
                worst = expert
        # Both only get closer: once a pair does not pay, none does.
        if best < 0 or worst < 0 or not scores[best] > scores[worst] + margin:
            return count
        outgoing[count] = worst
        incoming[count] = best
        count += 1
        missed[best] = False
        left[worst] = False


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
    """Pair a layer's missed experts with its residents (`pair_missed`).

    The state's first row of scores ranks them, its first row of marks says what is
    inside, its last number is the margin, and its first integer E.
    """
    width = state.integers[0]
    first = work.layer * width
    inside = np.zeros(width, np.bool_)
    settled = np.zeros(width, np.bool_)
    for expert in range(width):
        inside[expert] = state.marks[0, first + expert] != 0
        for gpu in range(len(states)):
            settled[expert] |= states[gpu, first + expert] == RESIDENT
        settled[expert] &= inside[expert]
    scores = state.scores[0][first : first + width]
    count = pair_missed(
        scores, work.experts, inside, settled, state.numbers[-1], outgoing, incoming
    )
    for n in range(count):
        outgoing[n] += first
        incoming[n] += first
    return count

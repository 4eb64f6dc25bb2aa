"""Caches that replace experts on their own account: a base that admits no fetched
expert, and the pairing of missed experts with residents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.machine_code.types import input_array
from moesim.policies.base import RESIDENT, CachePolicy, ExpertKey, Swap
from moesim.policies.cache._kernels import mark_keys
from moesim.policies.kernels import EXPERT_IDS, MOVED, REPLACEMENTS, State, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView, RunContext


class NoAdmissionCache(CachePolicy):
    """Admits nothing: what is fetched or prefetched runs from staging and is gone
    afterwards.

    A subclass may be empty, have fixed content (`initial`) or replace experts on its
    own account (`replacements`).
    """

    def admits(
        self,
        work: LayerWork,
        incoming: np.ndarray,
    ) -> np.ndarray:
        """Refuse all."""
        del work
        return np.zeros(len(incoming), dtype=np.bool_)

    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Decline all."""
        del candidates
        return np.full(len(incoming), -1, np.int64)


@compiled(
    nb.int64(
        nb.float64[::1],
        EXPERT_IDS,
        input_array(nb.boolean),
        input_array(nb.boolean),
        nb.float64,
        nb.int64[::1],
        nb.int64[::1],
    )
)
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
    """Pair a layer's missed experts with its residents (`pair_in_layer`)."""
    return pair_in_layer(state, work, work.experts, states, outgoing, incoming)


@compiled
def pair_in_layer(
    state: State,
    work: Work,
    experts: np.ndarray,
    states: np.ndarray,
    outgoing: np.ndarray,
    incoming: np.ndarray,
) -> int:
    """Pair the absent ones among some experts of a layer, int32, with its residents
    (`pair_missed`).

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
        scores, experts, inside, settled, state.numbers[-1], outgoing, incoming
    )
    for n in range(count):
        outgoing[n] += first
        incoming[n] += first
    return count


def swaps(
    work: LayerWork,
    scores: np.ndarray,
    inside: np.ndarray,
    settled: np.ndarray,
    margin: float,
) -> Sequence[Swap]:
    """What `pair_missed` says, as swaps of the layer."""
    outgoing = np.empty(len(work.experts), np.int64)
    incoming = np.empty(len(work.experts), np.int64)
    count = pair_missed(
        scores, work.experts, inside, settled, margin, outgoing, incoming
    )
    layer = work.layer
    pairs = zip(outgoing[:count].tolist(), incoming[:count].tolist(), strict=True)
    return [Swap(ExpertKey(layer, out), ExpertKey(layer, into)) for out, into in pairs]


class OwnReplacementsCache(NoAdmissionCache):
    """Tracks its content; admits nothing on demand. Subclasses answer `initial` and
    `replacements`.

    Attributes:
        inside: bool [L, E]: entered and not left, copies in flight included.
    """

    def start(self, context: RunContext) -> None:
        """Begin empty."""
        shape = context.shape
        self.inside = np.zeros((shape.layers, shape.experts), np.bool_)

    def admitted(self, keys: np.ndarray) -> None:
        """Note what has entered."""
        # Flat keys index the flattened array, which shares its memory.
        self.inside.reshape(-1)[keys] = True

    def evicted(self, keys: np.ndarray) -> None:
        """Note what has left."""
        self.inside.reshape(-1)[keys] = False

    def settled(
        self,
        layer: int,
        view: MachineView,
    ) -> np.ndarray:
        """Experts of this cache that have arrived and may be swapped out: bool [E]."""
        resident = view.resident(layer)
        for gpu in range(1, view.gpus):
            resident = resident | view.resident(layer, gpu)
        # What is inside may still be in flight, and then it cannot leave yet.
        return self.inside[layer] & resident

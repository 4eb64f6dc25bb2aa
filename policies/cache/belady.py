"""Belady's clairvoyant cache: farthest next use first."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.base import CachePolicy, PolicyError
from moesim.policies.cache._kernels import (
    by_descending_score,
    lowest_victims,
    outscored_victims,
)
from moesim.policies.compiled import CompiledCache
from moesim.policies.kernels import (
    ACCESSED,
    PRECEDENCE,
    VICTIMS,
    CacheKernels,
    State,
    Work,
    state,
)

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

# Rows of the state's marks.
_EDGES = 0
"""By layer step: where its accesses begin in the integers."""

# Places in the state's integers.
_EXPERTS = 0
_LAYERS = 1
_NEVER = 2
_ACCESSES = 3
"""From here on, by access: the step of the next use, and the expert."""

_ID_BITS = 16
"""Of an access, those of the expert."""


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    """Look up when the active experts come again.

    Scores change at uses alone: an expert's next use lies where it did before.
    """
    edges = state.marks[_EDGES]
    layer_step = work.step * state.integers[_LAYERS] + work.layer
    if work.layer >= state.integers[_LAYERS] or layer_step + 1 >= len(edges):
        return
    first = work.layer * state.integers[_EXPERTS]
    place = edges[layer_step]
    end = edges[layer_step + 1]
    # Host memory is told of some active experts only; both lists ascend.
    for expert in work.experts:
        while place < end and state.integers[place] % (1 << _ID_BITS) < expert:
            place += 1
        if place == end:
            return
        use = state.integers[place] >> _ID_BITS
        time = -np.inf
        if use < state.integers[_NEVER]:
            time = -float(use * state.integers[_LAYERS] + work.layer)
        state.scores[0][first + expert] = time


@compiled(PRECEDENCE)
def _precedence(state: State, incoming: np.ndarray) -> None:
    ordered = by_descending_score(incoming, state.scores[0])
    for n in range(len(incoming)):
        incoming[n] = ordered[n]


@compiled(VICTIMS)
def _victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    best = outscored_victims(incoming, candidates, state.scores[0])
    for n in range(len(incoming)):
        chosen[n] = best[n]


class Belady(CompiledCache):
    """Evict the expert whose next use lies farthest in the future.

    A next use is one strictly after this layer step. "Never again" is farthest; ties go
    to the lower id. In global scope the time of a use is its step, then its layer. An
    expert's next use changes only when it is used, so the score (minus that time) is
    refreshed for the active experts alone, and prefetched ones need no bookkeeping.
    Where more experts come in than can enter, those that are needed soonest do.

    No policy has more hits where requests come one at a time and experts are of equal
    size. A layer step asks for several at once, and those that are resident are held
    while it runs: they cannot leave for one that is needed sooner. So where a step's
    active experts fill most of the cache (batches, prompts, small caches) this is no
    bound, and even LRU may have more hits; `belady-size` states one that always holds.

    Args:
        must_admit: False may decline an expert whose next use is later than that of
            everything it could replace; it then runs from staging. True is the textbook
            MIN, where each miss enters, as long as there is a resident that is not
            held.

    Source: Belady 1966 (MIN); layer steps as one request each are ours.
    """

    oracle: ClassVar[bool] = True
    # Everything may enter, so that nobody needs to ask.
    admits = CachePolicy.admits

    def __init__(self, *, must_admit: bool = False) -> None:
        self.must_admit = must_admit

    def bring(self, context: RunContext) -> CacheKernels:
        """Look up the first use of every expert, and the next one of every access.

        Raises:
            PolicyError: the future is not available.
        """
        if context.future is None:
            raise PolicyError(
                "cache policy 'belady' must see the future; only a replay of a whole"
                " trace has one"
            )
        shape = context.shape
        future = context.future
        edges = np.asarray(future.edges)
        every_expert = np.arange(shape.experts, dtype=np.int32)
        layers = range(shape.layers)
        # Strictly after step -1 is from the very first step on.
        uses = [future.next_uses(-1, layer, every_expert) for layer in layers]
        first_uses = np.array(uses)
        # A trace may end before the model's last layer.
        per_step = (len(edges) - 1) // max(1, future.never)
        times = first_uses * per_step + np.array(layers)[:, None]
        scores = np.where(first_uses < future.never, -times.astype(np.float64), -np.inf)

        sizes = (shape.experts, per_step, future.never)
        accesses = future.following.astype(np.int64) << _ID_BITS | future.experts
        known = state(
            [scores.reshape(-1)],
            [edges + _ACCESSES],
            integers=np.concatenate((sizes, accesses)),
        )
        return CacheKernels(
            known,
            victims=lowest_victims if self.must_admit else _victims,
            accessed=_accessed,
            precedence=_precedence,
        )

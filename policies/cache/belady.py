"""Belady's clairvoyant cache, the bound for experts of equal size."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.cache import _kernels, _next_use
from moesim.policies.cache._kernels import lowest_victims
from moesim.policies.cache._next_use import (
    by_descending_score,
    outscored_victims,
    score_next_uses,
)
from moesim.policies.cache._score_based import ScoreBasedCache
from moesim.policies.kernels import (
    ACCESSED,
    PRECEDENCE,
    VICTIMS,
    CacheKernels,
    State,
    Work,
    state,
)
from moesim.traces.compilation import linked
from moesim.traces.format.future import RecordedFuture

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext

# Rows of the state's marks.
_EDGES = 0
"""By layer step: where its accesses begin in the integers."""

_SIZES = 3
"""Integers before the first access: experts, layers, never."""


@linked(ACCESSED, _kernels, _next_use)
def _accessed(state: State, work: Work) -> None:
    width = state.integers[0]
    layers = state.integers[1]
    first = work.layer * width
    begin = state.marks[_EDGES, work.step * layers + work.layer]
    score_next_uses(
        state.scores[0][first : first + width],
        work.experts,
        state.integers[begin : begin + len(work.experts)],
        work.layer,
        layers,
        state.integers[2],
    )


@linked(PRECEDENCE, _kernels, _next_use)
def _precedence(state: State, incoming: np.ndarray) -> None:
    ordered = by_descending_score(incoming, state.scores[0])
    for n in range(len(incoming)):
        incoming[n] = ordered[n]


@linked(VICTIMS, _kernels, _next_use)
def _victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    best = outscored_victims(incoming, candidates, state.scores[0])
    for n in range(len(incoming)):
        chosen[n] = best[n]


class Belady(ScoreBasedCache):
    """Evict the expert whose next use lies farthest in the future.

    A next use is one strictly after this layer step. "Never again" is farthest; ties go
    to the lower id. In global scope the time of a use is its step, then its layer. An
    expert's next use changes only when it is used, so the score (minus that time) is
    refreshed for the active experts alone, and prefetched ones need no bookkeeping.
    Where more experts come in than can enter, those that are needed soonest do.

    Args:
        must_admit: False may decline an expert whose next use is later than that of
            everything it could replace; it then runs from staging. That is the bound
            for a machine with staging. True is the textbook MIN, where each miss
            enters, as long as there is a resident that is not held.

    Source: Belady 1966 (MIN); the step-atomic form is algorithms §5.5.
    """

    oracle: ClassVar[bool] = True

    def __init__(self, *, must_admit: bool = False) -> None:
        self.must_admit = must_admit

    def start(self, context: RunContext) -> None:
        """Look up the first use of every expert.

        Raises:
            PolicyError: the future is not available.
        """
        super().start(context)
        if context.future is None:
            raise PolicyError(
                "cache policy 'belady' must see the future; only a replay of a whole"
                " trace has one"
            )
        self._future = context.future
        self._layers = context.shape.layers
        every_expert = np.arange(self.experts, dtype=np.int32)
        for layer in range(self._layers):
            # Strictly after step -1 is from the very first step on.
            self._refresh(-1, layer, every_expert)

    def accessed(self, work: LayerWork) -> None:
        """Look up when the active experts come again."""
        self._refresh(work.step, work.layer, work.experts)

    def precedence(self, incoming: np.ndarray) -> np.ndarray:
        """Admit first what is needed first."""
        return by_descending_score(incoming, self.score)

    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Choose the farthest, or decline what would come back even later."""
        # The base only compares candidates with each other.
        if self.must_admit:
            return super().victims(incoming, candidates)
        return outscored_victims(incoming, candidates, self.score)

    def kernels(self) -> CacheKernels | None:
        """The same in compiled runs; none where the future is not a recorded one."""
        future = self._future
        if not isinstance(future, RecordedFuture):
            return None
        sizes = (self.experts, self._layers, future.never)
        return CacheKernels(
            state(
                [self.score],
                [future.edges + _SIZES],
                integers=np.concatenate((sizes, future.following)),
            ),
            victims=lowest_victims if self.must_admit else _victims,
            accessed=_accessed,
            precedence=_precedence,
        )

    def _refresh(
        self,
        step: int,
        layer: int,
        experts: np.ndarray,
    ) -> None:
        """Score `experts`, int32 [A], by their next uses after `step`."""
        score_next_uses(
            self.score[self.keys_of(layer)],
            experts,
            self._future.next_uses(step, layer, experts),
            layer,
            self._layers,
            self._future.never,
        )

"""LFRU, least frequently recently used: frequency discounted by age."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numba import types as nb

from moesim.policies.cache import _kernels
from moesim.policies.cache._kernels import (
    count_accesses,
    lowest_scores,
    mark_keys,
    stamp,
    stamp_keys,
)
from moesim.policies.cache._score_based import ScoreBasedCache
from moesim.policies.compilation import KEYS, SECONDS
from moesim.policies.kernels import (
    ACCESSED,
    MOVED,
    VICTIMS,
    CacheKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect_choice
from moesim.traces.compilation import compiled, linked

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext

Variant = Literal["perfect", "in-cache"]

# `count_accesses` with this factor never ages a count.
_NO_DECAY = 1.0

_SCORE = 0
_USES = 1
_LAST = 2
"""Rows of the scores of a compiled run."""


@compiled(nb.void(nb.float64[::1], SECONDS, SECONDS, KEYS, nb.float64))
def _uses_per_age(
    score: np.ndarray,
    uses: np.ndarray,
    last: np.ndarray,
    keys: np.ndarray,
    now: float,
) -> None:
    """Score `keys` by uses per layer step since the last use."""
    for key in keys:
        score[key] = uses[key] / (now - last[key] + 1.0)


@linked(ACCESSED, _kernels)
def _accessed(state: State, work: Work) -> None:
    state.numbers[0] += 1.0
    width = state.integers[0]
    first = work.layer * width
    count_accesses(
        state.scores[_USES], state.marks[0], work.experts, first, width, _NO_DECAY
    )
    stamp(state.scores[_LAST], work.experts, first, state.numbers[0])


@linked(MOVED, _kernels)
def _admitted(state: State, keys: np.ndarray) -> None:
    stamp_keys(state.scores[_LAST], keys, state.numbers[0])
    if state.integers[1]:
        stamp_keys(state.scores[_USES], keys, 1.0)
        mark_keys(state.marks[0], keys, 1)


@linked(MOVED, _kernels)
def _evicted(state: State, keys: np.ndarray) -> None:
    if state.integers[1]:
        mark_keys(state.marks[0], keys, 0)


@linked(VICTIMS, _kernels)
def _victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    score = state.scores[_SCORE]
    uses = state.scores[_USES]
    last = state.scores[_LAST]
    _uses_per_age(score, uses, last, candidates, state.numbers[0])
    lowest_scores(candidates, score, score, chosen)


class LFRU(ScoreBasedCache):
    """Evict the expert with the fewest uses per layer step since its last use; ties to
    the lower id.

    The score is ``uses / (now - last use + 1)``. A use is one layer step in which the
    expert is active. Now counts the layer steps, of all layers, that this memory has
    seen (2608.07911).

    Args:
        variant: ``perfect`` counts the uses of the whole run (2608.07911; the best
            causal policy of peers §1.1); ``in-cache`` counts from 1 on entering and
            forgets at eviction (tinyserve, vLLM #37190).

    Source: peers §1.3.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, *, variant: Variant = "perfect") -> None:
        expect_choice("variant", variant, Variant)
        self.variant = variant

    def start(self, context: RunContext) -> None:
        """Begin all counts at 0; `perfect` counts every expert from the start."""
        super().start(context)
        keys = len(self.score)
        self._uses = np.zeros(keys)
        self._last = np.zeros(keys)
        self._counted = np.full(keys, self.variant == "perfect", np.int64)
        self._now = 0.0

    def accessed(self, work: LayerWork) -> None:
        """Count and stamp the active experts."""
        self._now += 1.0
        first = work.layer * self.experts
        count_accesses(
            self._uses,
            self._counted,
            work.experts,
            first,
            self.experts,
            _NO_DECAY,
        )
        stamp(self._last, work.experts, first, self._now)

    def admitted(self, keys: np.ndarray) -> None:
        """Entering is a use in the cache, and fresh."""
        # A prefetched expert would otherwise be judged by its last use, long ago.
        stamp_keys(self._last, keys, self._now)
        if self.variant == "in-cache":
            stamp_keys(self._uses, keys, 1.0)
            mark_keys(self._counted, keys, 1)

    def evicted(self, keys: np.ndarray) -> None:
        """Forget what leaves, unless all-time counts are kept."""
        if self.variant == "in-cache":
            mark_keys(self._counted, keys, 0)

    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Choose the lowest frequency per age."""
        # Scores fall with every layer step, so they are worked out when needed.
        _uses_per_age(self.score, self._uses, self._last, candidates, self._now)
        return super().victims(incoming, candidates)

    def kernels(self) -> CacheKernels:
        """The same in compiled runs."""
        return CacheKernels(
            state(
                [self.score, self._uses, self._last],
                [self._counted],
                numbers=[self._now],
                integers=[self.experts, self.variant == "in-cache"],
            ),
            victims=_victims,
            accessed=_accessed,
            admitted=_admitted,
            evicted=_evicted,
        )

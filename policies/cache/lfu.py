"""LFU, least frequently used."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.policies.cache import _kernels
from moesim.policies.cache._kernels import (
    count_accesses,
    lowest_victims,
    mark_keys,
    stamp,
    stamp_keys,
)
from moesim.policies.cache._score_based import ScoreBasedCache
from moesim.policies.kernels import (
    ACCESSED,
    MOVED,
    CacheKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect, expect_choice
from moesim.traces.compilation import linked

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext

Variant = Literal["in-cache", "perfect"]
Tie = Literal["id", "fifo", "lru"]


@linked(ACCESSED, _kernels)
def _accessed(state: State, work: Work) -> None:
    """Count the active experts that are counted, after ageing their layer.

    Scores: counts, and where ties are not by id, the tie's numbers. Marks: what is
    counted. Numbers: layer steps, decay. Integers: E, whether entering starts a count,
    whether ties go to the least recently used.
    """
    width = state.integers[0]
    first = work.layer * width
    decay = state.numbers[1]
    count_accesses(state.scores[0], state.marks[0], work.experts, first, width, decay)
    state.numbers[0] += 1.0
    if state.integers[2]:
        stamp(state.scores[1], work.experts, first, state.numbers[0])


@linked(MOVED, _kernels)
def _admitted(state: State, keys: np.ndarray) -> None:
    """Begin to count what enters."""
    if state.integers[1]:
        stamp_keys(state.scores[0], keys, 1.0)
        mark_keys(state.marks[0], keys, 1)
    if len(state.scores) > 1:
        stamp_keys(state.scores[1], keys, state.numbers[0])


@linked(MOVED, _kernels)
def _evicted(state: State, keys: np.ndarray) -> None:
    """Forget what leaves, unless all-time counts are kept."""
    if state.integers[1]:
        mark_keys(state.marks[0], keys, 0)


class LFU(ScoreBasedCache):
    """Evict the expert with the fewest uses.

    A use is one layer step in which the expert is active, however many tokens it
    serves.

    Args:
        variant: ``in-cache`` counts while an expert is in the cache, from 1 on entering
            (by demand or prefetch), and forgets at eviction, as FlashMoE's baseline and
            libCacheSim do; ``perfect`` counts every use of the whole run, in the cache
            or not.
        decay: factor on a layer's counts before each of its steps; 1 never forgets.
        tie: between equal counts, ``id`` evicts the lower id (our rule, and CECAR's
            training code), ``fifo`` the first to enter (CECAR's runtime), ``lru`` the
            least recently used (libCacheSim; algorithms §5.5).

    Source: textbook; variants as in algorithms §5.5. The defaults are FlashMoE's
    baseline with our tie rule, and never forget because no paper gives a rate; a decay
    is the moving average of peers §1.3.
    """

    reference: ClassVar[tuple[str, ...]] = ("", "variant=perfect")

    def __init__(
        self,
        *,
        variant: Variant = "in-cache",
        decay: float = 1.0,
        tie: Tie = "id",
    ) -> None:
        expect_choice("variant", variant, Variant)
        expect_choice("tie", tie, Tie)
        expect(0.0 < decay <= 1.0, "decay", "0 < decay <= 1", decay)
        self.variant = variant
        self.decay = decay
        self.tie_rule = tie

    def start(self, context: RunContext) -> None:
        """Begin all counts at 0; `perfect` counts every expert from the start."""
        super().start(context)
        self._now = 0.0
        from_the_start = self.variant == "perfect"
        self._counted = np.full(len(self.score), from_the_start, np.int64)
        # Without an array of its own, equal counts fall through to the lower id.
        if self.tie_rule != "id":
            self.tie = np.zeros(len(self.score))

    def accessed(self, work: LayerWork) -> None:
        """Count the active experts that are counted, after ageing their layer."""
        first = work.layer * self.experts
        count_accesses(
            self.score,
            self._counted,
            work.experts,
            first,
            self.experts,
            self.decay,
        )
        self._now += 1.0
        if self.tie_rule == "lru":
            stamp(self.tie, work.experts, first, self._now)

    def admitted(self, keys: np.ndarray) -> None:
        """Begin to count what enters."""
        if self.variant == "in-cache":
            stamp_keys(self.score, keys, 1.0)
            mark_keys(self._counted, keys, 1)
        # Both other rules begin with the entry; `fifo` never moves it again.
        if self.tie_rule != "id":
            stamp_keys(self.tie, keys, self._now)

    def evicted(self, keys: np.ndarray) -> None:
        """Forget what leaves, unless all-time counts are kept."""
        if self.variant == "in-cache":
            mark_keys(self._counted, keys, 0)

    def kernels(self) -> CacheKernels:
        """The same in compiled runs."""
        scores = [self.score] if self.tie_rule == "id" else [self.score, self.tie]
        rules = [self.variant == "in-cache", self.tie_rule == "lru"]
        return CacheKernels(
            state(
                scores,
                [self._counted],
                numbers=[self._now, self.decay],
                integers=[self.experts, *rules],
            ),
            victims=lowest_victims,
            accessed=_accessed,
            admitted=_admitted,
            evicted=_evicted,
        )

"""LRU, least recently used."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.policies.cache._kernels import (
    lowest_victims,
    lru_accessed,
    lru_admitted,
    stamp,
    stamp_keys,
)
from moesim.policies.cache._score_based import ScoreBasedCache
from moesim.policies.kernels import CacheKernels, state

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.base import LayerWork, RunContext


class LRU(ScoreBasedCache):
    """Evict the expert that was used least recently.

    Step-atomic: the active experts of a layer step are used at the same instant, so
    ties are real and go to the lower id. Entering counts as a use, so that a prefetched
    expert that is never used ages and leaves.

    Source: textbook; step-atomic as in algorithms §5.5. Mixtral-Offloading's and
    AdapMoE's cache.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def start(self, context: RunContext) -> None:
        """Begin the count of layer steps."""
        super().start(context)
        # A float, as it becomes a score; exact up to 2**53 layer steps.
        self._now = 0.0

    def accessed(self, work: LayerWork) -> None:
        """Stamp the active experts with the layer step's number."""
        self._now += 1.0
        first = work.layer * self.experts
        stamp(self.score, work.experts, first, self._now)

    def admitted(self, keys: np.ndarray) -> None:
        """Stamp what enters."""
        stamp_keys(self.score, keys, self._now)

    def kernels(self) -> CacheKernels:
        """The same in compiled runs."""
        return CacheKernels(
            state([self.score], numbers=[self._now], integers=[self.experts]),
            victims=lowest_victims,
            accessed=lru_accessed,
            admitted=lru_admitted,
        )

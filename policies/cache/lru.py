"""Least recently used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.cache._score_based import ScoredCache
from moesim.policies.kernels import stamp

if TYPE_CHECKING:
    import numpy as np
    from moesim.policies.base import LayerWork, RunContext


class LRU(ScoredCache):
    """Evict the expert whose last use is oldest.

    Step-atomic: the active experts of a layer step are used at the same instant, so
    ties are real and go to the lower id. Entering counts as a use, so that a prefetched
    expert that nobody asked for ages and leaves.

    Source: textbook; step-atomic as in algorithms §5.5. Mixtral-Offloading's and
    AdapMoE's cache.
    """

    def start(self, context: RunContext) -> None:
        """Begin the count of layer steps."""
        super().start(context)
        self._now = 0.0

    def accessed(self, work: LayerWork) -> None:
        """Stamp the active experts with the layer step's number."""
        self._now += 1.0
        stamp(self.score, work.experts, work.layer * self.experts, self._now)

    def admitted(self, keys: np.ndarray) -> None:
        """Stamp what enters."""
        self.score[keys] = self._now

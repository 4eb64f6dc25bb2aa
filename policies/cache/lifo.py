"""Last in, first out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.cache._kernels import (
    fifo_admitted,
    lowest_victims,
    number_keys,
)
from moesim.policies.cache._score_based import ScoreBasedCache
from moesim.policies.kernels import CacheKernels, state

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.base import RunContext


class LIFO(ScoreBasedCache):
    """Evict the expert that entered last; a hit changes nothing.

    Experts of one layer step enter in launch order. What is held stays, so the last of
    a step leaves in the next.

    Source: a baseline of FlashMoE (algorithms §5.5).
    """

    def start(self, context: RunContext) -> None:
        """Begin to count entries."""
        super().start(context)
        self._entries = 0

    def admitted(self, keys: np.ndarray) -> None:
        """Number what enters, downwards."""
        # Negated: the base evicts the lowest score.
        number_keys(self.score, keys, self._entries, -1.0)
        self._entries += len(keys)

    def kernels(self) -> CacheKernels:
        """The same in compiled runs."""
        return CacheKernels(
            state([self.score], numbers=[self._entries, -1.0]),
            victims=lowest_victims,
            admitted=fifo_admitted,
        )

"""First in, first out."""

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


class FIFO(ScoreBasedCache):
    """Evict the expert that entered first; a hit changes nothing.

    Experts of one layer step enter in launch order. Equal to libCacheSim's FIFO on one
    request at a time.

    Source: textbook; a baseline of peers §1.3 and algorithms §5.5.
    """

    def start(self, context: RunContext) -> None:
        """Begin to count entries."""
        super().start(context)
        self._entries = 0

    def admitted(self, keys: np.ndarray) -> None:
        """Number what enters."""
        # In order within a step, too: later keys of `keys` entered later.
        number_keys(self.score, keys, self._entries, 1.0)
        self._entries += len(keys)

    def kernels(self) -> CacheKernels:
        """The same in compiled runs."""
        return CacheKernels(
            state([self.score], numbers=[self._entries, 1.0]),
            victims=lowest_victims,
            admitted=fifo_admitted,
        )

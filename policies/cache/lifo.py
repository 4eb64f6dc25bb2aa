"""Last in, first out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.cache._score_based import ScoreBasedCache

if TYPE_CHECKING:
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
        number = self._entries + np.arange(len(keys), dtype=np.float64)
        # Negated: the base evicts the lowest score.
        self.score[keys] = -number
        self._entries += len(keys)

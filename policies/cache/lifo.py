"""Last in, first out."""

from __future__ import annotations

from moesim.policies.cache.fifo import FIFO


class LIFO(FIFO):
    """Evict the expert that entered last; a hit changes nothing.

    Experts of one layer step enter in launch order. What is held stays, so the last of
    a step leaves in the next.

    Source: a baseline of FlashMoE (arXiv 2601.17063).
    """

    def admitted(self, key: int) -> None:
        # The lowest leaves, so entries count downwards.
        self.score[key] = -self.entries
        self.entries += 1.0

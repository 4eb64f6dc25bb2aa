"""First in, first out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.ranked_cache import RankedCache

if TYPE_CHECKING:
    from moesim.policies.run_context import RunContext


class FIFO(RankedCache):
    """Evict the expert that entered first; a hit changes nothing.

    Experts of one layer step enter in launch order. Equal to libCacheSim's FIFO on one
    request at a time.

    Source: textbook.
    """

    def start(self, context: RunContext) -> None:
        RankedCache.start(self, context)
        self.entries = 0.0

    def admitted(self, key: int) -> None:
        self.score[key] = self.entries
        self.entries += 1.0

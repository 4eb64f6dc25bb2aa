"""LRU, least recently used."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.policies.ranked_cache import RankedCache

if TYPE_CHECKING:
    from moesim.policies.base import Work


class LRU(RankedCache):
    """Evict the expert that was used least recently; entering counts as a use.

    Step-atomic: the active experts of a layer step are used at the same instant, so
    ties are real and go to the lower id.

    Source: textbook. Mixtral-Offloading's and AdapMoE's cache.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self) -> None:
        # A float, as it becomes a score; exact up to 2**53 layer steps.
        self.now = 0.0

    def accessed(self, work: Work) -> None:
        self.now += 1.0
        for i in range(work.active):
            self.score[work.first + work.experts[i]] = self.now

    def admitted(self, key: int) -> None:
        self.score[key] = self.now

"""LFU, least frequently used."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.policies.arrays import filled, zeros
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranked_cache import RankedCache

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

Variant = Literal["in-cache", "perfect"]
Tie = Literal["id", "fifo", "lru"]


class LFU(RankedCache):
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
            least recently used (libCacheSim).

    Source: textbook. The defaults are FlashMoE's baseline with our tie rule, and never
    forget because no paper gives a rate.
    """

    reference: ClassVar[tuple[str, ...]] = ("", "variant=perfect")

    def __init__(
        self, *, variant: Variant = "in-cache", decay: float = 1.0, tie: Tie = "id"
    ) -> None:
        expect_choice("variant", variant, Variant)
        expect_choice("tie", tie, Tie)
        expect(0.0 < decay <= 1.0, "decay", "0 < decay <= 1", decay)
        self.decay = decay
        self.forgets = variant == "in-cache"
        self.dates_entries = tie != "id"
        self.dates_uses = tie == "lru"

    def start(self, context: RunContext) -> None:
        RankedCache.start(self, context)
        keys = len(self.score)
        self.counted: Ints = filled(keys, not self.forgets, np.int8)
        if self.dates_entries:
            self.tie = zeros(keys)
        self.now = 0.0

    def accessed(self, work: Work) -> None:
        self.now += 1.0
        if self.decay < 1.0:
            for key in range(work.first, work.first + self.experts):
                self.score[key] *= self.decay
        for i in range(work.active):
            key = work.first + work.experts[i]
            if self.counted[key]:
                self.score[key] += 1.0
            if self.dates_uses:
                self.tie[key] = self.now

    def admitted(self, key: int) -> None:
        if self.forgets:
            self.score[key] = 1.0
            self.counted[key] = 1
        if self.dates_entries:
            self.tie[key] = self.now

    def evicted(self, key: int) -> None:
        if self.forgets:
            self.counted[key] = 0

"""Pinned favourites beside an LRU cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.cache.lru import LRU
from moesim.policies.cache.static import Static
from moesim.policies.names import NONE
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranked_cache import lowest

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

Fill = Literal["auto", "calibrated", "lowest", "random"]


class PinnedLRU(LRU):
    """Pin the most used experts in a share of the slots; the rest is an LRU cache.

    What is pinned never leaves; a newcomer that finds only pinned and active experts
    runs from staging. The other slots begin empty.

    Args:
        share: of each layer's slots (of all slots in global scope), rounded down.
        fill: what is pinned, as in `static`: ``auto`` takes the most often activated
            experts of the calibration trace where there is one, else the lowest ids.
        preload: whether what is pinned is there before the run; false lets it enter at
            its first use, until when its slot serves the others.

    Source: "half pinned, half LRU" of engines with an expert cache, which ask how much
    of a layer's routing is a hot set.
    """

    # Unlike LRU's, what it keeps may rest on a calibration.
    reference: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, *, share: float = 0.5, fill: Fill = "auto", preload: bool = True
    ) -> None:
        expect(0.0 <= share <= 1.0, "share", "0 <= share <= 1", share)
        expect_choice("fill", fill, Fill)
        LRU.__init__(self)
        self.share = share
        self.preload = preload
        self.favourites = Static(fill=fill)

    def start(self, context: RunContext) -> None:
        """Rank the experts, and begin with no uses."""
        LRU.start(self, context)
        self.pinned: Ints = zeros(len(self.score), np.int8)
        if context.pool_bytes is not None:
            pinned_bytes = np.floor(self.share * context.pool_bytes)
            context = replace(context, pool_bytes=pinned_bytes.astype(np.int64))
        self.favourites.start(context)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Pin the favourites, and name those that are there: int64 flat keys,
        ascending.
        """
        slots = np.floor(self.share * capacity_slots).astype(np.int64)
        keys = self.favourites.initial(slots)
        for key in keys.tolist():
            self.pinned[key] = 1
            self.score[key] = math.inf
        return keys if self.preload else keys[:0]

    def accessed(self, work: Work) -> None:
        self.now += 1.0
        for i in range(work.active):
            self.admitted(work.first + work.experts[i])

    def admitted(self, key: int) -> None:
        if not self.pinned[key]:
            self.score[key] = self.now

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        lowest(candidates, self.score, self.tie, chosen)
        # Pinned ones score highest: they are chosen only where nobody else is left.
        for n in range(len(chosen)):
            if chosen[n] >= 0 and self.pinned[chosen[n]]:
                chosen[n] = NONE

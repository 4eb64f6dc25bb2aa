"""S3-FIFO: a small probation queue, a main queue, and a ghost list."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.cache._request_lists import RequestCache
from moesim.policies.names import NONE
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.run_context import RunContext

Variant = Literal["paper", "libcachesim"]

MOST_USES = 3
"""A 2-bit counter."""

PROBATION = 0
MAIN = 1
GHOSTS = 2
"""Lists of a pool."""


class S3FIFO(RequestCache):
    """Evict new experts early from a small queue, unless they were used there: then
    they move to the main queue.

    What leaves the small queue becomes a ghost; a ghost that returns enters the main
    queue. The main queue gives a used expert another round for each use, at most 3.
    Held experts stay where they are. Requests are made from layer steps as
    `moesim.policies.cache._request_lists` defines.

    Args:
        small: share of the slots for the small queue, at least one slot.
        ghosts: remembered evictions of the small queue, as a share of the slots.
        uses: uses in the small queue that qualify for the main one.
        variant: ``paper`` evicts from the small queue whenever it is full, else from
            the main one, and fills the small queue first; ``libcachesim`` evicts from
            the main queue only when that is over its size, and lets newcomers fill the
            main queue until the first eviction. That form equals libCacheSim's S3FIFO.

    Source: Yang et al., SOSP 2023, algorithm 1; libCacheSim ``S3FIFO.c`` for the second
    variant.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def __init__(
        self,
        *,
        small: float = 0.1,
        ghosts: float = 0.9,
        uses: int = 2,
        variant: Variant = "paper",
    ) -> None:
        expect(0.0 < small < 1.0, "small", "0 < small < 1", small)
        expect(ghosts >= 0.0, "ghosts", ">= 0", ghosts)
        expect(uses >= 1, "uses", ">= 1", uses)
        expect_choice("variant", variant, Variant)
        self.small = small
        self.ghosts = ghosts
        self.qualifying = uses
        self.as_published = variant == "paper"

    def start(self, context: RunContext) -> None:
        self.make_lists(context, lists=3, ghosts=1)
        self.uses: Ints = zeros(self.keys, np.int64)
        self.small_slots: Ints = zeros(self.pools, np.int64)
        self.most_ghosts: Ints = zeros(self.pools, np.int64)
        self.has_evicted: Ints = zeros(self.pools, np.int8)
        for pool, slots in enumerate(context.capacity_slots.tolist()):
            self.small_slots[pool] = max(1, int(slots * self.small))
            self.most_ghosts[pool] = int(slots * self.ghosts)

    def hit(self, pool: int, key: int) -> None:
        self.uses[key] = min(self.uses[key] + 1, MOST_USES)

    def miss(self, pool: int, key: int) -> int:
        self.has_evicted[pool] = 1
        # Before a victim is chosen: its ghost may push this one out of the list.
        returning = self._take_ghost(pool, key)
        probation = self._probation_gives(pool)
        victim = NONE
        # Again and again, as promotions out of one queue may fill the other.
        while victim == NONE:
            victim = self._from_probation(pool) if probation else self._from_main(pool)
            probation = not probation
        self._enter(pool, MAIN if returning else PROBATION, key)
        return victim

    def fill(self, pool: int, key: int) -> None:
        returning = self._take_ghost(pool, key)
        overflows = (
            not self.as_published
            and not self.has_evicted[pool]
            and self._waiting(pool) >= self.small_slots[pool]
        )
        self._enter(pool, MAIN if returning or overflows else PROBATION, key)

    def _waiting(self, pool: int) -> int:
        return self.size[self.head(pool, PROBATION)]

    def _enter(self, pool: int, number: int, key: int) -> None:
        self.append(self.head(pool, number), key)
        self.uses[key] = 0

    def _take_ghost(self, pool: int, key: int) -> bool:
        """Remove `key` from the ghosts; whether it was one."""
        if self.list_of(pool, key) != GHOSTS:
            return False
        self.remove(key)
        return True

    def _probation_gives(self, pool: int) -> bool:
        """Whether the victim is to come from the small queue."""
        small = self.small_slots[pool]
        if self.as_published:
            return self._waiting(pool) >= small
        fits = self.size[self.head(pool, MAIN)] <= self.capacity[pool] - small
        return fits and self._waiting(pool) > 0

    def _from_probation(self, pool: int) -> int:
        """Promote used keys until one has too few uses: the victim. -1 if all were
        promoted or held.
        """
        probation = self.head(pool, PROBATION)
        ghosts = self.head(pool, GHOSTS)
        key = self.first_free(probation)
        while key != NONE:
            self.remove(key)
            if self.uses[key] < self.qualifying:
                self.append(ghosts, key)
                if self.size[ghosts] > self.most_ghosts[pool]:
                    self.remove(self.following[ghosts])
                break
            self._enter(pool, MAIN, key)
            key = self.first_free(probation)
        return key

    def _from_main(self, pool: int) -> int:
        """Put used keys behind all others, one use fewer, until one has none: the
        victim. -1 if all are held.
        """
        main = self.head(pool, MAIN)
        key = self.first_free(main)
        while key != NONE:
            self.remove(key)
            if not self.uses[key]:
                break
            self.append(main, key)
            self.uses[key] -= 1
            key = self.first_free(main)
        return key

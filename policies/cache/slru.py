"""SLRU, segmented LRU."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from moesim.policies.cache._request_lists import RequestCache
from moesim.policies.names import NONE
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.run_context import RunContext

Entry = Literal["lowest", "free"]


class SLRU(RequestCache):
    """Evict from the lowest of several LRU segments; every hit moves an expert one
    segment up.

    Every segment above the lowest has an equal share of the slots, rounded down; one
    that overflows hands its least recent expert down to the segment below. Requests are
    made from layer steps as `moesim.policies.cache._request_lists` defines.

    Args:
        segments: 2 are probation and protected, as published; 4 are S4LRU.
        entry: ``lowest`` lets newcomers enter the lowest segment; ``free`` the lowest
            segment that is not full, as libCacheSim does.

    ``segments=4,entry=free`` equals libCacheSim's SLRU wherever 4 divides the capacity.
    Where it does not, libCacheSim's lowest segment can exceed its share, and a hit that
    hands an expert down to it evicts although nothing enters.

    Source: Karedla et al., IEEE Computer 1994 (two segments); Huang et al., SOSP 2013
    (four).
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, *, segments: int = 2, entry: Entry = "lowest") -> None:
        expect(segments >= 1, "segments", ">= 1", segments)
        expect_choice("entry", entry, Entry)
        self.segments = segments
        self.enters_free = entry == "free"

    def start(self, context: RunContext) -> None:
        self.make_lists(context, lists=self.segments)

    def hit(self, pool: int, key: int) -> None:
        level = self.list_of(pool, key)
        self.remove(key)
        self._put(pool, key, min(level + 1, self.segments - 1))

    def miss(self, pool: int, key: int) -> int:
        level = 0
        victim = self.first_free(self.head(pool, level))
        # A lowest segment with held experts alone leaves the choice to the next.
        while victim == NONE:
            level += 1
            victim = self.first_free(self.head(pool, level))
        # Left before the newcomer enters, or a segment would seem to overflow.
        self.remove(victim)
        self.fill(pool, key)
        return victim

    def fill(self, pool: int, key: int) -> None:
        level = 0
        if self.enters_free:
            while level < self.segments and self._is_full(pool, level):
                level += 1
        self._put(pool, key, 0 if level == self.segments else level)

    def _share(self, pool: int) -> int:
        """Slots of every segment above the lowest."""
        return self.capacity[pool] // self.segments

    def _is_full(self, pool: int, level: int) -> bool:
        return self.size[self.head(pool, level)] >= self._share(pool)

    def _put(self, pool: int, key: int, level: int) -> None:
        """Make `key` the most recent of a segment, and hand down what no longer
        fits.
        """
        self.append(self.head(pool, level), key)
        # The lowest has no limit of its own: the capacity of the pool is one.
        while level > 0:
            segment = self.head(pool, level)
            if self.size[segment] <= self._share(pool):
                return
            oldest = self.following[segment]
            self.remove(oldest)
            level -= 1
            self.append(self.head(pool, level), oldest)

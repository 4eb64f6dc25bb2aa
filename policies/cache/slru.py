"""SLRU, segmented LRU."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from moesim.policies.cache._per_request import PerRequestCache, RequestQueues, first
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from collections.abc import Container

    from moesim.policies.base import RunContext

Entry = Literal["lowest", "free"]


class SLRU(PerRequestCache):
    """Evict from the lowest of several LRU segments; every hit moves an expert one
    segment up.

    Every segment above the lowest has an equal share of the slots, rounded down; one
    that overflows hands its least recent expert down to the segment below. Requests are
    made from layer steps as `moesim.policies.cache._per_request` defines.

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
        self.entry = entry

    def pool(
        self,
        capacity: int,
        context: RunContext,
    ) -> RequestQueues:
        """Make empty segments."""
        del context
        return _Segments(self, capacity)


class _Segments:
    """One dictionary of keys per segment, lowest first, each least recent first."""

    def __init__(self, policy: SLRU, capacity: int) -> None:
        self.policy = policy
        self.share = capacity // policy.segments
        self.segments: list[dict[int, None]] = [{} for _ in range(policy.segments)]
        self.level: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self.level

    def hit(self, key: int) -> None:
        level = self.level[key]
        del self.segments[level][key]
        highest = len(self.segments) - 1
        self._put(key, min(level + 1, highest))

    def miss(self, key: int, free: Container[int]) -> int:
        # A lowest segment with held experts alone leaves the choice to the next.
        in_order = (first(segment, free) for segment in self.segments)
        victim = next(candidate for candidate in in_order if candidate >= 0)
        # Left before the newcomer enters, or a segment would seem to overflow.
        self.drop(victim)
        self.fill(key)
        return victim

    def fill(self, key: int) -> None:
        level = 0
        if self.policy.entry == "free":
            not_full = (
                n
                for n, segment in enumerate(self.segments)
                if len(segment) < self.share
            )
            level = next(not_full, 0)
        self._put(key, level)

    def drop(self, key: int) -> None:
        del self.segments[self.level.pop(key)][key]

    def _put(self, key: int, level: int) -> None:
        """Make `key` the most recent of a segment, and hand down what no longer
        fits.
        """
        self.segments[level][key] = None
        self.level[key] = level
        # The lowest has no limit of its own: the capacity of the pool is one.
        while level > 0 and len(self.segments[level]) > self.share:
            oldest = next(iter(self.segments[level]))
            del self.segments[level][oldest]
            level -= 1
            self.segments[level][oldest] = None
            self.level[oldest] = level

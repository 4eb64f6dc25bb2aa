"""S3-FIFO: a small probation queue, a main queue, and a ghost list."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, ClassVar, Literal

from moesim.policies.cache._per_request import (
    PerRequestCache,
    RequestQueues,
    first,
    forget_oldest,
)
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from collections.abc import Container

    from moesim.policies.base import RunContext

Variant = Literal["paper", "libcachesim"]

# A 2-bit counter.
_MOST_USES = 3


class S3FIFO(PerRequestCache):
    """Evict new experts early from a small queue, unless they were used there: then
    they move to the main queue.

    What leaves the small queue becomes a ghost; a ghost that returns enters the main
    queue. The main queue gives a used expert another round for each use, at most 3.
    Held experts stay where they are. Requests are made from layer steps as
    `moesim.policies.cache._per_request` defines.

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
        self.uses = uses
        self.variant = variant

    def pool(
        self,
        capacity: int,
        context: RunContext,
    ) -> RequestQueues:
        """Make the three queues."""
        del context
        return _Queues(self, capacity)


class _Queues:
    """`probation` and `main` hold uses by key, oldest first; so do ghosts, without
    uses.
    """

    def __init__(self, policy: S3FIFO, capacity: int) -> None:
        self.policy = policy
        self.small = max(1, int(capacity * policy.small))
        self.large = capacity - self.small
        self.most_ghosts = int(capacity * policy.ghosts)
        self.as_published = policy.variant == "paper"
        self.probation: dict[int, int] = {}
        self.main: dict[int, int] = {}
        self.ghosts: dict[int, None] = {}
        self.evicted_before = False

    def __contains__(self, key: int) -> bool:
        return key in self.probation or key in self.main

    def hit(self, key: int) -> None:
        queue = self.probation if key in self.probation else self.main
        queue[key] = min(queue[key] + 1, _MOST_USES)

    def miss(self, key: int, free: Container[int]) -> int:
        self.evicted_before = True
        # Before a victim is chosen: its ghost may push this one out of the list.
        returning = self._take_ghost(key)

        evictions = [self._from_probation, self._from_main]
        if not self._probation_first():
            evictions.reverse()
        victim = -1
        # Again and again, as promotions out of one queue may fill the other.
        for evict in cycle(evictions):
            victim = evict(free)
            if victim >= 0:
                break

        queue = self.main if returning else self.probation
        queue[key] = 0
        return victim

    def fill(self, key: int) -> None:
        returning = self._take_ghost(key)
        overflows = (
            not self.as_published
            and not self.evicted_before
            and len(self.probation) >= self.small
        )
        queue = self.main if returning or overflows else self.probation
        queue[key] = 0

    def drop(self, key: int) -> None:
        queue = self.probation if key in self.probation else self.main
        del queue[key]

    def _take_ghost(self, key: int) -> bool:
        """Remove `key` from the ghosts; whether it was one."""
        if key not in self.ghosts:
            return False
        del self.ghosts[key]
        return True

    def _probation_first(self) -> bool:
        """Whether the small queue is to give the victim."""
        if self.as_published:
            return len(self.probation) >= self.small
        main_fits = len(self.main) <= self.large
        return main_fits and len(self.probation) > 0

    def _from_probation(self, free: Container[int]) -> int:
        """Promote used keys until one has too few uses: the victim. -1 if all were
        promoted or held.
        """
        key = first(self.probation, free)
        while key >= 0:
            if self.probation.pop(key) < self.policy.uses:
                self.ghosts[key] = None
                if len(self.ghosts) > self.most_ghosts:
                    forget_oldest(self.ghosts)
                break
            self.main[key] = 0
            key = first(self.probation, free)
        return key

    def _from_main(self, free: Container[int]) -> int:
        """Put used keys behind all others, one use fewer, until one has none: the
        victim. -1 if all are held.
        """
        key = first(self.main, free)
        while key >= 0:
            uses = self.main.pop(key)
            if uses == 0:
                break
            self.main[key] = uses - 1
            key = first(self.main, free)
        return key

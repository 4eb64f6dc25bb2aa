"""S3-FIFO: a small queue on probation, a main queue, and ghosts of the first."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Literal

from moesim.policies.cache._per_request import RequestCache, Requests, first
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from collections.abc import Container

    from moesim.policies.base import RunContext

Variant = Literal["paper", "libcachesim"]

_MOST_USES = 3
"""A 2-bit counter."""


class S3FIFO(RequestCache):
    """Newcomers prove themselves in a small queue; who was used moves to the main one,
    the others become ghosts.

    A ghost that returns enters the main queue. The main queue gives a used expert
    another round for each use, at most 3. Held experts stay where they are. Requests
    are made from layer steps as `moesim.policies.cache._per_request` says.

    Args:
        small: share of the slots for the small queue, at least one slot.
        ghosts: remembered evictions of the small queue, as a share of the slots.
        uses: uses in the small queue that earn a place in the main one.
        variant: ``paper`` evicts from the small queue whenever it is full, else from
            the main one, and fills the small queue first; ``libcachesim`` evicts from
            the main queue only when that is over its size, and lets newcomers fill the
            main queue until the first eviction. That form equals libCacheSim's S3FIFO.

    Source: Yang et al., SOSP 2023, algorithm 1; libCacheSim ``S3FIFO.c`` for the second
    variant.
    """

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

    def pool(self, capacity: int, context: RunContext) -> Requests:
        """Open the three queues."""
        del context
        return _Queues(self, capacity)


class _Queues:
    """`probation` and `main` hold uses by key, oldest first; so do ghosts, without
    uses.
    """

    def __init__(self, rule: S3FIFO, capacity: int) -> None:
        self.rule = rule
        self.small = max(1, int(capacity * rule.small))
        self.large = capacity - self.small
        self.most_ghosts = int(capacity * rule.ghosts)
        self.literal = rule.variant == "paper"
        self.probation: dict[int, int] = {}
        self.main: dict[int, int] = {}
        self.ghosts: dict[int, None] = {}
        self.full = False

    def __contains__(self, key: int) -> bool:
        return key in self.probation or key in self.main

    def hit(self, key: int) -> None:
        queue = self.probation if key in self.probation else self.main
        queue[key] = min(queue[key] + 1, _MOST_USES)

    def miss(self, key: int, free: Container[int]) -> int:
        self.full = True
        known = key in self.ghosts
        self.ghosts.pop(key, None)
        payers = [self._from_probation, self._from_main]
        victim = -1
        for pay in cycle(payers if self._probation_pays() else payers[::-1]):
            victim = pay(free)
            if victim >= 0:
                break
        (self.main if known else self.probation)[key] = 0
        return victim

    def fill(self, key: int) -> None:
        known = key in self.ghosts
        self.ghosts.pop(key, None)
        early = not self.literal and not self.full and len(self.probation) >= self.small
        (self.main if known or early else self.probation)[key] = 0

    def drop(self, key: int) -> None:
        (self.probation if key in self.probation else self.main).pop(key)

    def _probation_pays(self) -> bool:
        if self.literal:
            return len(self.probation) >= self.small
        return len(self.main) <= self.large and len(self.probation) > 0

    def _from_probation(self, free: Container[int]) -> int:
        """Promote until somebody has earned no place; he leaves. -1 if all were
        promoted or held.
        """
        while (key := first(self.probation, free)) >= 0:
            if self.probation.pop(key) < self.rule.uses:
                self.ghosts[key] = None
                if len(self.ghosts) > self.most_ghosts:
                    del self.ghosts[next(iter(self.ghosts))]
                break
            self.main[key] = 0
        return key

    def _from_main(self, free: Container[int]) -> int:
        """Send used ones round again until one is spent; -1 if all are held."""
        while (key := first(self.main, free)) >= 0:
            uses = self.main.pop(key)
            if uses == 0:
                break
            self.main[key] = uses - 1
        return key

"""CLOCK, first in, first out with second chances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.cache._per_request import PerRequestCache, RequestQueues, first
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from collections.abc import Container

    from moesim.policies.base import RunContext


class Clock(PerRequestCache):
    """Evict the oldest expert that was not used since it was last considered.

    One that was used becomes the newest instead, with one use fewer. Held experts keep
    their position and uses. Requests are made from layer steps as
    `moesim.policies.cache._per_request` defines. Equal to libCacheSim's Clock on one
    request at a time.

    Args:
        rounds: uses that are remembered at most; 1 is the textbook's reference bit
            (second chance), and the default.

    Source: Corbató 1968; peers §1.3.
    """

    def __init__(self, *, rounds: int = 1) -> None:
        expect(rounds >= 1, "rounds", ">= 1", rounds)
        self.rounds = rounds

    def pool(
        self,
        capacity: int,
        context: RunContext,
    ) -> RequestQueues:
        """Make an empty queue."""
        # The capacity plays no part: keys enter only where the planner has a slot.
        del capacity, context
        return _Queue(self.rounds)


class _Queue:
    """Uses by key, oldest first."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.uses: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self.uses

    def hit(self, key: int) -> None:
        uses = self.uses[key] + 1
        self.uses[key] = min(uses, self.rounds)

    def miss(self, key: int, free: Container[int]) -> int:
        victim = first(self.uses, free)
        uses = self.uses.pop(victim)
        while uses:
            # Entered anew, so it stands behind all others.
            self.uses[victim] = uses - 1
            victim = first(self.uses, free)
            uses = self.uses.pop(victim)
        self.fill(key)
        return victim

    def fill(self, key: int) -> None:
        self.uses[key] = 0

    def drop(self, key: int) -> None:
        del self.uses[key]

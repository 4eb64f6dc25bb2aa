"""SIEVE, first in, first out with a moving hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.policies.cache._per_request import PerRequestCache, RequestQueues

if TYPE_CHECKING:
    from collections.abc import Container

    from moesim.policies.base import RunContext


class SIEVE(PerRequestCache):
    """Evict the first expert not used since a hand last passed it; the hand moves from
    the oldest to the newest.

    A used expert is spared once. The hand stays where it evicted; newcomers enter
    behind it. Held experts are passed over and keep their mark. Requests are made from
    layer steps as `moesim.policies.cache._per_request` defines. Equal to libCacheSim's
    Sieve on one request at a time.

    Source: Zhang et al., NSDI 2024, algorithm 1.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def pool(
        self,
        capacity: int,
        context: RunContext,
    ) -> RequestQueues:
        """Make an empty queue."""
        del capacity, context
        return _Queue()


class _Queue:
    """Keys oldest first; `hand` is the position it will look at next."""

    def __init__(self) -> None:
        self.queue: list[int] = []
        self.used: dict[int, bool] = {}
        self.hand = 0

    def __contains__(self, key: int) -> bool:
        return key in self.used

    def hit(self, key: int) -> None:
        self.used[key] = True

    def miss(self, key: int, free: Container[int]) -> int:
        while True:
            # Behind the newest comes the oldest.
            if self.hand >= len(self.queue):
                self.hand = 0
            victim = self.queue[self.hand]
            if victim in free:
                if not self.used[victim]:
                    break
                self.used[victim] = False
            self.hand += 1

        # The hand keeps its position, where the key after the victim now stands.
        del self.queue[self.hand]
        del self.used[victim]
        self.fill(key)
        return victim

    def fill(self, key: int) -> None:
        # It has walked off the newest: back to the oldest, before `key` enters.
        if self.hand >= len(self.queue):
            self.hand = 0
        self.queue.append(key)
        self.used[key] = False

    def drop(self, key: int) -> None:
        position = self.queue.index(key)
        del self.queue[position]
        del self.used[key]
        # What stood before the hand moves it down with it.
        if position < self.hand:
            self.hand -= 1

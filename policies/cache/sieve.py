"""SIEVE: first in, first out, but a hand skips what was used since it last passed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.cache._per_request import RequestCache, Requests

if TYPE_CHECKING:
    from collections.abc import Container

    from moesim.policies.base import RunContext


class SIEVE(RequestCache):
    """A hand walks from the oldest to the newest, spares what was used (once) and
    evicts the first that was not.

    The hand stays where it evicted; newcomers enter behind it. Held experts are passed
    over and keep their mark. Requests are made from layer steps as
    `moesim.policies.cache._per_request` says. Equal to libCacheSim's Sieve on one
    request at a time.

    Source: Zhang et al., NSDI 2024, algorithm 1.
    """

    def pool(self, capacity: int, context: RunContext) -> Requests:
        """Open an empty queue."""
        del capacity, context
        return _Queue()


class _Queue:
    """Keys oldest first; `hand` is the place it will look at next."""

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
            if self.hand >= len(self.queue):
                self.hand = 0
            victim = self.queue[self.hand]
            if victim in free:
                if not self.used[victim]:
                    break
                self.used[victim] = False
            self.hand += 1
        del self.queue[self.hand], self.used[victim]
        self.fill(key)
        return victim

    def fill(self, key: int) -> None:
        # It has walked off the newest: back to the oldest.
        if self.hand >= len(self.queue):
            self.hand = 0
        self.queue.append(key)
        self.used[key] = False

    def drop(self, key: int) -> None:
        place = self.queue.index(key)
        del self.queue[place], self.used[key]
        self.hand -= place < self.hand

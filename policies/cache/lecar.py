"""Two advisers, LRU and LFU, whose weights follow their regrets."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.cache._per_request import RequestCache, Requests, first
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from moesim.policies.base import RunContext


class LeCaR(RequestCache):
    """Evict what LRU or LFU names, drawn by weights that fall when a victim comes back
    soon.

    A victim goes to the ghost list of the adviser that chose it; if both named it, to
    none. A request for a ghost of adviser x multiplies x's weight by
    ``exp(-learning_rate · d^age)`` with d = ``discount^(1/capacity)``; weights sum to 1
    and stay within 0.01 and 0.99. A ghost returns with its count plus one. LFU ties go
    to the lower id. Requests are made from layer steps as
    `moesim.policies.cache._per_request` says; age counts requests.

    libCacheSim's LeCaR draws from a generator of its own, keeps one ghost list of full
    capacity, restores no counts and breaks LFU ties by insertion, so hit rates are
    close, not equal; the test states how close.

    Args:
        learning_rate: of the weights.
        discount: regret that is left after as many requests as the cache has slots.
        history: ghosts per adviser; none takes half the capacity, at least 1 (cacheus
            ``lecar.py``; the authors' paper is said to take the capacity).
        initial_weight: of LRU.

    Source: Vietri et al., HotStorage 2018; details of algorithms §5.5.
    """

    def __init__(
        self,
        *,
        learning_rate: float = 0.45,
        discount: float = 0.005,
        history: int | None = None,
        initial_weight: float = 0.5,
    ) -> None:
        expect(learning_rate >= 0.0, "learning_rate", ">= 0", learning_rate)
        expect(0.0 < discount <= 1.0, "discount", "0 < discount <= 1", discount)
        expect(history is None or history >= 1, "history", ">= 1 or none", history)
        expect(
            0.0 < initial_weight < 1.0,
            "initial_weight",
            "0 < initial_weight < 1",
            initial_weight,
        )
        self.learning_rate = learning_rate
        self.discount = discount
        self.history = history
        self.initial_weight = initial_weight

    def start(self, context: RunContext) -> None:
        """Seed the draws, shared by all pools."""
        self.draw: Callable[[], float] = np.random.default_rng(context.seed).random
        super().start(context)

    def pool(self, capacity: int, context: RunContext) -> Requests:
        """Open an empty cache with two ghost lists."""
        del context
        return _Advisers(self, capacity)


class _Advisers:
    """Counts in order of last use, and ghosts as key -> (count, time of eviction),
    oldest first.
    """

    def __init__(self, rule: LeCaR, capacity: int) -> None:
        self.rule = rule
        self.history = rule.history or max(1, capacity // 2)
        self.discount = rule.discount ** (1 / max(1, capacity))
        self.weight_lru = rule.initial_weight
        self.now = 0
        self.counts: dict[int, int] = {}
        self.heap: list[tuple[int, int]] = []
        self.ghosts: tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]] = (
            {},
            {},
        )

    def __contains__(self, key: int) -> bool:
        return key in self.counts

    def hit(self, key: int) -> None:
        self.now += 1
        self._count(key, self.counts.pop(key) + 1)

    def miss(self, key: int, free: Container[int]) -> int:
        self.now += 1
        count = self._recall(key)
        oldest = first(self.counts, free)
        rarest = self._rarest(free)
        adviser = int(self.rule.draw() >= self.weight_lru)
        victim = rarest if adviser else oldest
        left = self.counts.pop(victim)
        if oldest != rarest:
            ghosts = self.ghosts[adviser]
            ghosts[victim] = (left, self.now)
            if len(ghosts) > self.history:
                del ghosts[next(iter(ghosts))]
        self._count(key, count)
        return victim

    def fill(self, key: int) -> None:
        self.now += 1
        self._count(key, self._recall(key))

    def drop(self, key: int) -> None:
        del self.counts[key]

    def _count(self, key: int, count: int) -> None:
        """Make `key` the most recent, with a new count."""
        self.counts[key] = count
        heapq.heappush(self.heap, (count, key))

    def _rarest(self, free: Container[int]) -> int:
        """The lowest count that may leave; outdated entries of the heap are dropped on
        the way, held ones put back.
        """
        held = []
        while True:
            count, key = heapq.heappop(self.heap)
            if self.counts.get(key) != count:
                continue
            held.append((count, key))
            if key in free:
                break
        for entry in held:
            heapq.heappush(self.heap, entry)
        return key

    def _recall(self, key: int) -> int:
        """The count with which `key` enters; a ghost costs its adviser weight."""
        for adviser, ghosts in enumerate(self.ghosts):
            if key in ghosts:
                count, left_at = ghosts.pop(key)
                loss = math.exp(
                    -self.rule.learning_rate * self.discount ** (self.now - left_at)
                )
                lru = self.weight_lru
                lfu = 1.0 - self.weight_lru
                lru, lfu = (lru, lfu * loss) if adviser else (lru * loss, lfu)
                self.weight_lru = min(0.99, max(0.01, lru / (lru + lfu)))
                return count + 1
        return 1

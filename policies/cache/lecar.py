"""LeCaR: LRU and LFU, weighted by how often each was wrong."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.cache._request_lists import (
    PerRequestCache,
    RequestQueues,
    first,
    forget_oldest,
)
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from moesim.policies.base import RunContext

# Neither rule is ever given up: the weights stay within these.
_LEAST_WEIGHT = 0.01
_MOST_WEIGHT = 0.99

# Indices of the two rules and of their ghost lists.
_LRU = 0
_LFU = 1


class LeCaR(PerRequestCache):
    """Evict by LRU or LFU, drawn at random; a rule loses weight when its victim comes
    back soon.

    A victim goes to the ghost list of the rule that chose it; if both named it, to
    none. A request for a ghost of rule x multiplies x's weight by ``exp(-learning_rate
    · d^age)`` with d = ``discount^(1/capacity)``; weights sum to 1 and stay within 0.01
    and 0.99. A ghost returns with its count plus one. LFU ties go to the lower id.
    Requests are made from layer steps as `moesim.policies.cache._request_lists`
    defines; age counts requests.

    libCacheSim's LeCaR draws from a generator of its own, keeps one ghost list of full
    capacity, restores no counts and breaks LFU ties by insertion, so hit rates are
    close, not equal; the test states how close.

    Args:
        learning_rate: of the weights.
        discount: regret that is left after as many requests as the cache has slots.
        history: ghosts per rule; none takes half the capacity, at least 1 (cacheus
            ``lecar.py``; the authors' paper is said to take the capacity).
        initial_weight: of LRU.

    Source: Vietri et al., HotStorage 2018; details as in cacheus ``lecar.py``.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

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
        # One generator for all pools, so that layers do not repeat each other's draws.
        generator = np.random.default_rng(context.seed)
        self.draw: Callable[[], float] = generator.random
        super().start(context)

    def pool(
        self,
        capacity: int,
        context: RunContext,
    ) -> RequestQueues:
        """Make an empty cache with two ghost lists."""
        del context
        return _WeightedRules(self, capacity)


class _WeightedRules:
    """Counts in order of last use, and ghosts as key -> (count, time of eviction),
    oldest first.
    """

    def __init__(self, policy: LeCaR, capacity: int) -> None:
        self.policy = policy
        self.history = policy.history or max(1, capacity // 2)
        self.discount = policy.discount ** (1 / max(1, capacity))
        self.weight_lru = policy.initial_weight
        self.now = 0
        self.counts: dict[int, int] = {}
        self.heap: list[tuple[int, int]] = []
        self.ghosts: list[dict[int, tuple[int, int]]] = [{}, {}]

    def __contains__(self, key: int) -> bool:
        return key in self.counts

    def hit(self, key: int) -> None:
        self.now += 1
        self._count(key, self.counts.pop(key) + 1)

    def miss(self, key: int, free: Container[int]) -> int:
        self.now += 1
        # Before the draw: a returning ghost changes the weights of this very choice.
        count = self._recall(key)
        oldest = first(self.counts, free)
        rarest = self._rarest(free)
        rule = _LFU if self.policy.draw() >= self.weight_lru else _LRU
        victim = rarest if rule == _LFU else oldest

        victim_count = self.counts.pop(victim)
        if oldest != rarest:
            ghosts = self.ghosts[rule]
            ghosts[victim] = (victim_count, self.now)
            if len(ghosts) > self.history:
                forget_oldest(ghosts)
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
        # Older entries of the key stay in the heap; `_rarest` knows them by the count.
        heapq.heappush(self.heap, (count, key))

    def _rarest(self, free: Container[int]) -> int:
        """The lowest count that may leave; outdated entries of the heap are dropped on
        the way, held ones put back.
        """
        valid = []
        while True:
            count, key = heapq.heappop(self.heap)
            if self.counts.get(key) != count:
                continue
            valid.append((count, key))
            if key in free:
                break
        for entry in valid:
            heapq.heappush(self.heap, entry)
        return key

    def _recall(self, key: int) -> int:
        """The count with which `key` enters; a ghost costs its rule weight."""
        for rule, ghosts in enumerate(self.ghosts):
            if key in ghosts:
                count, evicted_at = ghosts.pop(key)
                age = self.now - evicted_at
                regret = self.discount**age
                loss = math.exp(-self.policy.learning_rate * regret)
                lru = self.weight_lru
                lfu = 1.0 - self.weight_lru
                if rule == _LFU:
                    lfu *= loss
                else:
                    lru *= loss
                weight = max(_LEAST_WEIGHT, lru / (lru + lfu))
                self.weight_lru = min(_MOST_WEIGHT, weight)
                return count + 1
        return 1

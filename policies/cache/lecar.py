"""LeCaR: LRU and LFU, weighted by how often each was wrong."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.arrays import filled, zeros
from moesim.policies.cache._request_lists import RequestCache
from moesim.policies.names import NONE
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.run_context import RunContext

# Neither rule is ever given up: the weights stay within these.
LEAST_WEIGHT = 0.01
MOST_WEIGHT = 0.99

CACHED = 0
LRU_GHOSTS = 1
LFU_GHOSTS = 2
"""Lists of a pool: residents, least recent first, and what each rule has evicted."""


class LeCaR(RequestCache):
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
        within = "0 < initial_weight < 1"
        expect(0.0 < initial_weight < 1.0, "initial_weight", within, initial_weight)
        self.learning_rate = learning_rate
        self.discount = discount
        self.history = history
        self.initial_weight = initial_weight

    def start(self, context: RunContext) -> None:
        self.make_lists(context, lists=3, ghosts=2)
        # One sequence of draws, shared by all pools.
        self.draw = np.random.default_rng(context.seed).random
        # By pool: LRU's weight, how much regret a request leaves, and requests so far.
        self.weight: Floats = filled(self.pools, self.initial_weight)
        self.left: Floats = zeros(self.pools)
        self.most_ghosts: Ints = zeros(self.pools, np.int64)
        self.now: Ints = zeros(self.pools, np.int64)
        for pool, slots in enumerate(context.capacity_slots.tolist()):
            self.left[pool] = self.discount ** (1 / max(1, slots))
            self.most_ghosts[pool] = self.history or max(1, slots // 2)
        # By key: uses, also those of a ghost, and when it became one.
        self.count: Ints = zeros(self.keys, np.int64)
        self.evicted_at: Ints = zeros(self.keys, np.int64)

    def hit(self, pool: int, key: int) -> None:
        self.now[pool] += 1
        self.remove(key)
        self._enter(pool, key, self.count[key] + 1)

    def miss(self, pool: int, key: int) -> int:
        self.now[pool] += 1
        # Before the draw: a returning ghost changes the weights of this very choice.
        count = self._recall(pool, key)
        oldest = self.first_free(self.head(pool, CACHED))
        rarest = self._rarest(pool)
        victim = oldest
        ghosts = self.head(pool, LRU_GHOSTS)
        if self.draw() >= self.weight[pool]:
            victim = rarest
            ghosts = self.head(pool, LFU_GHOSTS)
        self.remove(victim)
        if oldest != rarest:
            self.append(ghosts, victim)
            self.evicted_at[victim] = self.now[pool]
            if self.size[ghosts] > self.most_ghosts[pool]:
                self.remove(self.following[ghosts])
        self._enter(pool, key, count)
        return victim

    def fill(self, pool: int, key: int) -> None:
        self.now[pool] += 1
        self._enter(pool, key, self._recall(pool, key))

    def _enter(self, pool: int, key: int, count: int) -> None:
        self.append(self.head(pool, CACHED), key)
        self.count[key] = count

    def _rarest(self, pool: int) -> int:
        """The key with the lowest count that may leave, ties to the lower id."""
        rarest = NONE
        queue = self.head(pool, CACHED)
        key = self.following[queue]
        while key != queue:
            if self.free[key] and (
                rarest == NONE
                or self.count[key] < self.count[rarest]
                or (self.count[key] == self.count[rarest] and key < rarest)
            ):
                rarest = key
            key = self.following[key]
        return rarest

    def _recall(self, pool: int, key: int) -> int:
        """The count with which `key` enters; a ghost costs its rule weight."""
        ghosts = self.list_of(pool, key)
        if ghosts == NONE:
            return 1
        self.remove(key)
        regret = self.left[pool] ** (self.now[pool] - self.evicted_at[key])
        loss = math.exp(-self.learning_rate * regret)
        lru = self.weight[pool]
        lfu = 1.0 - lru
        if ghosts == LFU_GHOSTS:
            lfu *= loss
        else:
            lru *= loss
        weight = max(LEAST_WEIGHT, lru / (lru + lfu))
        self.weight[pool] = min(MOST_WEIGHT, weight)
        return self.count[key] + 1

"""SIEVE, first in, first out with a moving hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.cache._request_lists import RequestCache

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.run_context import RunContext


class SIEVE(RequestCache):
    """Evict the first expert not used since a hand last passed it; the hand moves from
    the oldest to the newest.

    A used expert is spared once. The hand stays where it evicted; newcomers enter
    behind it. Held experts are passed over and keep their mark. Requests are made from
    layer steps as `moesim.policies.cache._request_lists` defines. Equal to
    libCacheSim's Sieve on one request at a time.

    Source: Zhang et al., NSDI 2024, algorithm 1.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def start(self, context: RunContext) -> None:
        self.make_lists(context, lists=1)
        # Whether it was used since the hand last passed it.
        self.used: Ints = zeros(self.keys, np.int8)
        # By pool, the key that it looks at next; the head behind the newest.
        self.hand: Ints = zeros(self.pools, np.int64)
        for pool in range(self.pools):
            self.hand[pool] = self.head(pool, 0)

    def hit(self, pool: int, key: int) -> None:
        self.used[key] = 1

    def miss(self, pool: int, key: int) -> int:
        queue = self.head(pool, 0)
        victim = self.hand[pool]
        while True:
            # Behind the newest comes the oldest.
            if victim == queue:
                victim = self.following[queue]
            if self.free[victim]:
                if not self.used[victim]:
                    break
                self.used[victim] = 0
            victim = self.following[victim]
        self.hand[pool] = self.following[victim]
        self.remove(victim)
        self.fill(pool, key)
        return victim

    def fill(self, pool: int, key: int) -> None:
        queue = self.head(pool, 0)
        # It has walked off the newest: back to the oldest, before `key` enters.
        if self.hand[pool] == queue:
            self.hand[pool] = self.following[queue]
        self.append(queue, key)
        self.used[key] = 0
        # There was no oldest.
        if self.hand[pool] == queue:
            self.hand[pool] = key

    def drop(self, pool: int, key: int) -> None:
        if self.hand[pool] == key:
            self.hand[pool] = self.following[key]
        self.remove(key)

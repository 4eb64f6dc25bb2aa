"""CLOCK, first in, first out with second chances."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.cache._request_lists import RequestCache
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.run_context import RunContext


class Clock(RequestCache):
    """Evict the oldest expert that was not used since it was last considered.

    One that was used becomes the newest instead, with one use fewer. Held experts keep
    their position and uses. Requests are made from layer steps as
    `moesim.policies.cache._request_lists` defines. Equal to libCacheSim's Clock on one
    request at a time.

    Args:
        rounds: uses that are remembered at most; 1 is the textbook's reference bit
            (second chance), and the default.

    Source: Corbató, A Paging Experiment with the Multics System, 1968.
    """

    def __init__(self, *, rounds: int = 1) -> None:
        expect(rounds >= 1, "rounds", ">= 1", rounds)
        self.rounds = rounds

    def start(self, context: RunContext) -> None:
        self.make_lists(context, lists=1)
        self.uses: Ints = zeros(self.keys, np.int64)

    def hit(self, pool: int, key: int) -> None:
        self.uses[key] = min(self.uses[key] + 1, self.rounds)

    def miss(self, pool: int, key: int) -> int:
        queue = self.head(pool, 0)
        victim = self.first_free(queue)
        self.remove(victim)
        while self.uses[victim]:
            self.uses[victim] -= 1
            self.append(queue, victim)
            victim = self.first_free(queue)
            self.remove(victim)
        self.fill(pool, key)
        return victim

    def fill(self, pool: int, key: int) -> None:
        self.append(self.head(pool, 0), key)
        self.uses[key] = 0

"""ARC, the adaptive replacement cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from moesim.policies.arrays import zeros
from moesim.policies.cache._request_lists import RequestCache
from moesim.policies.cache.static import Static
from moesim.policies.names import NONE
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.arrays import Floats
    from moesim.policies.run_context import RunContext

Fill = Literal["empty", "lowest"]
Ratio = Literal["whole", "real"]

ONCE = 0
OFTEN = 1
GHOST_ONCE = 2
GHOST_OFTEN = 3
"""Lists of a pool, each least recent first: T1, T2 and their ghosts B1, B2."""


class ARC(RequestCache):
    """Divide the cache between experts used once (T1) and more often (T2), and shift
    the division when an evicted one returns.

    A ghost hit moves the target p by max(1, ratio of the ghost lists), measured before
    the ghost is removed; T1 gives the victim while it is larger than p (or as large,
    when the ghost was in B2). Requests are made from layer steps as
    `moesim.policies.cache._request_lists` defines; if the list that should give the
    victim has only held experts, the other does.

    Args:
        ratio: ``whole`` divides the ghost lists as integers, as cacheus ``arc.py``
            does, ``real`` exactly, as libCacheSim does: that form equals its ARC on one
            request at a time. The paper leaves it open.
        fill: ``lowest`` fills the cache with the lowest ids before the run, as Fate's
            code does; of ``empty`` a calibration may make something else.

    Source: Megiddo and Modha, FAST 2003, figure 4.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, *, ratio: Ratio = "whole", fill: Fill = "empty") -> None:
        expect_choice("ratio", ratio, Ratio)
        expect_choice("fill", fill, Fill)
        self.whole = ratio == "whole"
        self.fill_rule = fill

    def start(self, context: RunContext) -> None:
        self.make_lists(context, lists=4, ghosts=2)
        # The paper's p, by pool.
        self.target: Floats = zeros(self.pools)
        self._lowest_ids = Static(fill="lowest")
        self._lowest_ids.start(context)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """Fill with the lowest ids, if asked for."""
        if self.fill_rule == "lowest":
            return self._lowest_ids.initial(capacity_slots)
        return None

    def hit(self, pool: int, key: int) -> None:
        self.remove(key)
        self.append(self.head(pool, OFTEN), key)

    def miss(self, pool: int, key: int) -> int:
        # Measured before `fill` removes the ghost, as the paper does.
        ghost = self.list_of(pool, key)
        target = self.target[pool]
        if ghost == GHOST_ONCE:
            shift = self._shift(pool, GHOST_OFTEN, GHOST_ONCE)
            target = min(target + shift, float(self.capacity[pool]))
        elif ghost == GHOST_OFTEN:
            shift = self._shift(pool, GHOST_ONCE, GHOST_OFTEN)
            target = max(target - shift, 0.0)
        self.target[pool] = target

        size = self._size(pool, ONCE)
        giver = OFTEN
        if size > target or (ghost == GHOST_OFTEN and size == target):
            giver = ONCE
        victim = self.first_free(self.head(pool, giver))
        # The other list is asked where the first has only held experts.
        if victim == NONE:
            giver = OFTEN if giver == ONCE else ONCE
            victim = self.first_free(self.head(pool, giver))
        self.remove(victim)
        self.append(self.head(pool, GHOST_ONCE + giver), victim)
        self.fill(pool, key)
        return victim

    def fill(self, pool: int, key: int) -> None:
        # Into T2 from a ghost list, else into T1.
        if self.list_of(pool, key) == NONE:
            self.append(self.head(pool, ONCE), key)
        else:
            self.hit(pool, key)
        # Ghosts beyond c in L1 and 2c in all are forgotten (cases A and B).
        capacity = self.capacity[pool]
        once = self._size(pool, ONCE) + self._size(pool, GHOST_ONCE)
        self._forget_oldest(pool, GHOST_ONCE, once - capacity)
        once = self._size(pool, ONCE) + self._size(pool, GHOST_ONCE)
        often = self._size(pool, OFTEN) + self._size(pool, GHOST_OFTEN)
        self._forget_oldest(pool, GHOST_OFTEN, once + often - 2 * capacity)

    def _size(self, pool: int, number: int) -> int:
        return self.size[self.head(pool, number)]

    def _forget_oldest(self, pool: int, number: int, count: int) -> None:
        """Remove so many keys from a list, or all."""
        head = self.head(pool, number)
        for _ in range(min(count, self.size[head])):
            self.remove(self.following[head])

    def _shift(self, pool: int, other: int, returning: int) -> float:
        """How far a hit in the ghost list `returning` moves the target."""
        others = self._size(pool, other)
        ghosts = self._size(pool, returning)
        if self.whole:
            return max(1.0, float(others // ghosts))
        return max(1.0, others / ghosts)

"""ARC, the adaptive replacement cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from moesim.policies.cache._per_request import (
    PerRequestCache,
    RequestQueues,
    first,
    forget_oldest,
)
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from collections.abc import Container

    from moesim.policies.base import RunContext

Ratio = Literal["whole", "real"]


class ARC(PerRequestCache):
    """Divide the cache between experts used once (T1) and more often (T2), and shift
    the division when an evicted one returns.

    A ghost hit moves the target p by max(1, ratio of the ghost lists), measured before
    the ghost is removed; T1 gives the victim while it is larger than p (or as large,
    when the ghost was in B2). Requests are made from layer steps as
    `moesim.policies.cache._per_request` defines; if the list that should give the
    victim has only held experts, the other does.

    Args:
        ratio: ``whole`` divides the ghost lists as integers (algorithms §5.5; cacheus
            ``arc.py``), ``real`` exactly, as libCacheSim does: that form equals its ARC
            on one request at a time. The paper leaves it open.

    Source: Megiddo and Modha, FAST 2003, figure 4.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, *, ratio: Ratio = "whole") -> None:
        expect_choice("ratio", ratio, Ratio)
        self.ratio = ratio

    def pool(
        self,
        capacity: int,
        context: RunContext,
    ) -> RequestQueues:
        """Make four empty lists."""
        del context
        return _Lists(capacity, integers=self.ratio == "whole")


class _Lists:
    """T1, T2 and their ghosts B1, B2, each least recent first; `target` is the paper's
    p.
    """

    # Dictionaries without values: they keep their order, and find a key at once.

    def __init__(self, capacity: int, *, integers: bool) -> None:
        self.capacity = capacity
        self.integers = integers
        self.target = 0.0
        self.once: dict[int, None] = {}
        self.often: dict[int, None] = {}
        self.ghost_once: dict[int, None] = {}
        self.ghost_often: dict[int, None] = {}

    def __contains__(self, key: int) -> bool:
        return key in self.once or key in self.often

    def hit(self, key: int) -> None:
        queue = self.once if key in self.once else self.often
        del queue[key]
        self.often[key] = None

    def miss(self, key: int, free: Container[int]) -> int:
        # Measured before `fill` removes the ghost, as the paper does.
        returning = key in self.ghost_often
        if key in self.ghost_once:
            shift = self._shift(self.ghost_often, self.ghost_once)
            self.target = min(self.target + shift, self.capacity)
        elif returning:
            shift = self._shift(self.ghost_once, self.ghost_often)
            self.target = max(self.target - shift, 0.0)

        size = len(self.once)
        once_first = size > self.target or (returning and size == self.target)
        lists = [
            (self.once, self.ghost_once),
            (self.often, self.ghost_often),
        ]
        if not once_first:
            lists.reverse()
        victim = -1
        # The second list is asked where the first has only held experts.
        for queue, ghosts in lists:
            victim = first(queue, free)
            if victim >= 0:
                del queue[victim]
                ghosts[victim] = None
                break
        self.fill(key)
        return victim

    def fill(self, key: int) -> None:
        """Enter T2 from a ghost list, else T1; then forget ghosts beyond c in L1 and 2c
        in all (cases A and B).
        """
        if key in self.ghost_once or key in self.ghost_often:
            self.ghost_once.pop(key, None)
            self.ghost_often.pop(key, None)
            self.often[key] = None
        else:
            self.once[key] = None

        excess = len(self.once) + len(self.ghost_once) - self.capacity
        for _ in range(min(excess, len(self.ghost_once))):
            forget_oldest(self.ghost_once)

        cached = len(self.once) + len(self.often)
        ghosts = len(self.ghost_once) + len(self.ghost_often)
        excess = cached + ghosts - 2 * self.capacity
        for _ in range(min(excess, len(self.ghost_often))):
            forget_oldest(self.ghost_often)

    def drop(self, key: int) -> None:
        self.once.pop(key, None)
        self.often.pop(key, None)

    def _shift(self, other: dict[int, None], hit: dict[int, None]) -> float:
        """How far a hit in the ghost list `hit` moves the target."""
        if self.integers:
            return max(1, len(other) // len(hit))
        return max(1, len(other) / len(hit))

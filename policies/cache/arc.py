"""Adaptive replacement: recency and frequency share the cache, ghosts decide the
shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moesim.policies.cache._per_request import RequestCache, Requests, first
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from collections.abc import Container

    from moesim.policies.base import RunContext

Ratio = Literal["whole", "real"]


class ARC(RequestCache):
    """Keep experts seen once (T1) and more often (T2); hits on evicted ones shift the
    target size of T1.

    A ghost hit moves the target p by max(1, ratio of the ghost lists), measured before
    the ghost is removed; T1 pays while it is larger than p (or as large, when the ghost
    was in B2). Requests are made from layer steps as
    `moesim.policies.cache._per_request` says; if the list that should pay has only held
    experts, the other pays.

    Args:
        ratio: ``whole`` divides the ghost lists as integers (algorithms §5.5; cacheus
            ``arc.py``), ``real`` exactly, as libCacheSim does: that form equals its ARC
            on one request at a time. The paper leaves it open.

    Source: Megiddo and Modha, FAST 2003, figure 4.
    """

    def __init__(self, *, ratio: Ratio = "whole") -> None:
        expect_choice("ratio", ratio, Ratio)
        self.ratio = ratio

    def pool(self, capacity: int, context: RunContext) -> Requests:
        """Open four empty lists."""
        del context
        return _Lists(capacity, whole=self.ratio == "whole")


class _Lists:
    """T1, T2 and their ghosts B1, B2, each least recent first; `target` is the paper's
    p.
    """

    def __init__(self, capacity: int, *, whole: bool) -> None:
        self.capacity = capacity
        self.whole = whole
        self.target = 0.0
        self.once: dict[int, None] = {}
        self.often: dict[int, None] = {}
        self.ghost_once: dict[int, None] = {}
        self.ghost_often: dict[int, None] = {}

    def __contains__(self, key: int) -> bool:
        return key in self.once or key in self.often

    def hit(self, key: int) -> None:
        (self.once if key in self.once else self.often).pop(key)
        self.often[key] = None

    def miss(self, key: int, free: Container[int]) -> int:
        returning = key in self.ghost_often
        if key in self.ghost_once:
            self.target = min(
                self.target + self._shift(self.ghost_often, self.ghost_once),
                self.capacity,
            )
        elif returning:
            self.target = max(
                self.target - self._shift(self.ghost_once, self.ghost_often), 0.0
            )
        pays = len(self.once) > self.target or (
            returning and len(self.once) == self.target
        )
        lists = [(self.once, self.ghost_once), (self.often, self.ghost_often)]
        victim = -1
        for queue, ghosts in lists if pays else lists[::-1]:
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
        while self.ghost_once and len(self.once) + len(self.ghost_once) > self.capacity:
            del self.ghost_once[next(iter(self.ghost_once))]
        held = len(self.once) + len(self.often) + len(self.ghost_once)
        while self.ghost_often and held + len(self.ghost_often) > 2 * self.capacity:
            del self.ghost_often[next(iter(self.ghost_often))]

    def drop(self, key: int) -> None:
        self.once.pop(key, None)
        self.often.pop(key, None)

    def _shift(self, other: dict[int, None], own: dict[int, None]) -> float:
        return max(1, len(other) // len(own) if self.whole else len(other) / len(own))

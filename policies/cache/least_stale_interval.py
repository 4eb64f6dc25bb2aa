"""Least-Stale by reuse interval, one of three public policies of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.policies.arrays import filled, zeros
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranked_cache import RankedCache

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

Memory = Literal["in-cache", "perfect"]


class LeastStaleInterval(RankedCache):
    """Evict the expert whose next use is expected last, from its mean interval between
    uses.

    The expected next use is ``last use + max(1, expected interval)``. The expected
    interval is a moving average of the gaps between uses, seeded with the first gap;
    before that it is 0. Time is the number of layer steps that this memory has seen, so
    that the active experts of a layer step are used at one instant. Ties go to the
    later last use, as in the public code, then to the lower id.

    Args:
        weight: of a new gap; 0.25 as in the public code.
        memory: ``in-cache`` forgets last use and interval at eviction, as the public
            code does; ``perfect`` never.

    Source: "Least-Stale" as public reimplementations have it, by expected intervals;
    not SpecMD's, which is `moesim.policies.cache.least_stale_pass`.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, *, weight: float = 0.25, memory: Memory = "in-cache") -> None:
        expect(0.0 < weight <= 1.0, "weight", "0 < weight <= 1", weight)
        expect_choice("memory", memory, Memory)
        self.weight = weight
        self.forgets = memory == "in-cache"

    def start(self, context: RunContext) -> None:
        RankedCache.start(self, context)
        keys = len(self.score)
        self.tie = zeros(keys)
        self.last: Floats = zeros(keys)
        self.interval: Floats = zeros(keys)
        self.known: Ints = filled(keys, not self.forgets, np.int8)
        self.now = 0.0

    def accessed(self, work: Work) -> None:
        self.now += 1.0
        for i in range(work.active):
            key = work.first + work.experts[i]
            if not self.known[key]:
                continue
            # Time begins at 1, so a last use of 0 is none, and there is no gap.
            if self.last[key] > 0.0:
                self._average(key, self.now - self.last[key])
            self._stamp(key)

    def admitted(self, key: int) -> None:
        # Entering is a use; without a memory, the first.
        if self.forgets:
            self.interval[key] = 0.0
            self.known[key] = 1
        self._stamp(key)

    def evicted(self, key: int) -> None:
        if self.forgets:
            self.known[key] = 0

    def _average(self, key: int, gap: float) -> None:
        interval = self.interval[key]
        if interval != 0.0:
            gap = (1.0 - self.weight) * interval + self.weight * gap
        self.interval[key] = gap

    def _stamp(self, key: int) -> None:
        self.last[key] = self.now
        # Negated, as the lowest score leaves, then the lowest tie.
        self.score[key] = -(self.now + max(self.interval[key], 1.0))
        self.tie[key] = -self.now

"""Least-Stale by reuse interval, one of three public policies of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.policies.base import flat_keys
from moesim.policies.cache._score_based import ScoreBasedCache
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext

Memory = Literal["in-cache", "perfect"]


class LeastStaleInterval(ScoreBasedCache):
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
        self.memory = memory

    def start(self, context: RunContext) -> None:
        """Begin with no intervals."""
        super().start(context)
        keys = len(self.score)
        self.tie = np.zeros(keys)
        self._last = np.zeros(keys)
        self._interval = np.zeros(keys)
        self._known = np.full(keys, self.memory == "perfect")
        self._now = 0.0

    def accessed(self, work: LayerWork) -> None:
        """Average the gap since the last use of each active expert that is known."""
        self._now += 1.0
        keys = flat_keys(work, self.experts)
        used = keys[self._known[keys]]

        # Time begins at 1, so a last use of 0 is none, and there is no gap to average.
        again = used[self._last[used] > 0.0]
        gap = self._now - self._last[again]
        interval = self._interval[again]
        averaged = (1.0 - self.weight) * interval + self.weight * gap
        self._interval[again] = np.where(interval == 0.0, gap, averaged)
        self._stamp(used)

    def admitted(self, keys: np.ndarray) -> None:
        """Entering is a use; without a memory, the first."""
        if self.memory == "in-cache":
            self._interval[keys] = 0.0
            self._known[keys] = True
        self._stamp(keys)

    def evicted(self, keys: np.ndarray) -> None:
        """Forget what leaves, unless nothing is forgotten."""
        if self.memory == "in-cache":
            self._known[keys] = False

    def _stamp(self, keys: np.ndarray) -> None:
        """Note a use of `keys` at this layer step."""
        self._last[keys] = self._now
        # Negated: the base evicts the lowest score, then the lowest tie.
        interval = np.maximum(self._interval[keys], 1.0)
        self.score[keys] = -(self._now + interval)
        self.tie[keys] = -self._now

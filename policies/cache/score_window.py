"""SMoE's cache: mean gate scores over a window of steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.parameters import expect
from moesim.policies.ranked_cache import RankedCache

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext


class ScoreWindow(RankedCache):
    """Evict the expert with the lowest mean gate score over the last `window` steps of
    its layer.

    Steps in which it was inactive count too. Before a layer has seen `window` steps,
    the mean is over those it has seen. A step of many tokens counts by the mean over
    its tokens. Ties go to the least recently used, then to the lower id. SMoE's shield,
    that experts selected for the current layer cannot leave before it ends, is what the
    planner's holds do for every policy (the text says "elevates eviction priority" and
    means protects). In global scope the means of different layers are compared as they
    are.

    Args:
        window: iterations; SMoE does not give it, our default is 8 (to be swept over 4,
            8, 16).

    Source: SMoE (arXiv 2508.18983), its expert cache.
    """

    needs: tuple[str, ...] = ("scores",)

    def __init__(self, *, window: int = 8) -> None:
        expect(window >= 1, "window", ">= 1", window)
        self.window = window

    def start(self, context: RunContext) -> None:
        """Begin with empty windows."""
        RankedCache.start(self, context)
        keys = self.layers * self.experts
        self.tie = zeros(keys)
        self.now = 0.0
        self.ring: Floats = zeros((self.window, keys))
        self.seen: Ints = zeros(self.layers, np.int64)

    def accessed(self, work: Work) -> None:
        self.now += 1.0
        for i in range(work.active):
            self.tie[work.first + work.experts[i]] = self.now
        if len(work.scores):
            self._roll(work)

    def _roll(self, work: Work) -> None:
        """Let the newest scores take the place of the oldest, and renew the means."""
        seen = self.seen[work.layer]
        self.seen[work.layer] = seen + 1
        newest = seen % self.window
        rows = min(seen + 1, self.window)
        for expert in range(self.experts):
            key = work.first + expert
            self.ring[newest, key] = work.scores[expert]
            total = 0.0
            for row in range(rows):
                total += self.ring[row, key]
            self.score[key] = total / rows

    def admitted(self, key: int) -> None:
        self.tie[key] = self.now

"""SMoE's cache: mean gate scores over a window of steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import flat_keys
from moesim.policies.cache._score_based import ScoreBasedCache
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext


class ScoreWindow(ScoreBasedCache):
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

    Source: SMoE, algorithms §3.3.
    """

    needs: tuple[str, ...] = ("scores",)

    def __init__(self, *, window: int = 8) -> None:
        expect(window >= 1, "window", ">= 1", window)
        self.window = window

    def start(self, context: RunContext) -> None:
        """Begin with empty windows."""
        super().start(context)
        layers = context.shape.layers
        self.tie = np.zeros(len(self.score))
        self._recent = np.zeros((layers, self.window, self.experts))
        self._seen = [0] * layers
        self._now = 0.0

    def accessed(self, work: LayerWork) -> None:
        """Put this step's scores into the layer's window; a step without scores changes
        nothing.
        """
        self._now += 1.0
        self.tie[flat_keys(work, self.experts)] = self._now
        if work.scores is None:
            return

        seen = self._seen[work.layer]
        self._seen[work.layer] = seen + 1
        # A ring: the newest step takes the row of the oldest. The slice of rows below
        # is shorter than the ring until that is full.
        recent = self._recent[work.layer]
        newest = work.scores.mean(axis=0, dtype=np.float64)
        recent[seen % self.window] = newest
        mean = recent[: seen + 1].mean(axis=0)
        self.score[self.keys_of(work.layer)] = mean

    def admitted(self, keys: np.ndarray) -> None:
        """Entering is a use, for ties."""
        self.tie[keys] = self._now

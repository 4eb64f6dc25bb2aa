"""Caches that rank experts by a number: the lowest score leaves first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.base import CachePolicy
from moesim.policies.kernels import lowest

if TYPE_CHECKING:
    from moesim.policies.base import RunContext


class ScoredCache(CachePolicy):
    """Keep `score` up to date in `accessed` and `admitted`; choosing victims is done
    here.

    Equal scores are told apart by `tie`, lower first, then by the lower key. Both are
    float64 [L * E] by flat key, ``layer * experts + expert``; `tie` is the score itself
    unless a policy gives it an array of its own.
    """

    score: np.ndarray
    tie: np.ndarray
    experts: int

    def start(self, context: RunContext) -> None:
        """Make room for one score per expert of the model, all 0."""
        self.experts = context.shape.experts
        self.score = self.tie = np.zeros(context.shape.layers * self.experts)

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Choose the lowest scores among `candidates`, lowest for the first of
        `incoming`.
        """
        return lowest(candidates, self.score, self.tie, len(incoming))

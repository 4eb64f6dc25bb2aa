"""Base of caches that rank experts by a number and evict the lowest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import CachePolicy
from moesim.policies.cache._kernels import lowest_scores

if TYPE_CHECKING:
    from moesim.policies.base import RunContext


class ScoreBasedCache(CachePolicy):
    """Evicts the lowest scores. Subclasses keep `score` up to date in `accessed` and
    `admitted`.

    Equal scores are told apart by `tie`, lower first, then by the lower key.

    Attributes:
        score: float64 [L * E] by flat key, ``layer * experts + expert``.
        tie: likewise; the score itself unless a policy gives it an array of its own.
        experts: E.
    """

    score: np.ndarray
    tie: np.ndarray
    experts: int

    def start(self, context: RunContext) -> None:
        """Make one score per expert of the model, all 0."""
        self.experts = context.shape.experts
        self.score = np.zeros(context.shape.layers * self.experts)
        # The same array: without a tie rule, ties fall through to the lower key.
        self.tie = self.score

    def keys_of(self, layer: int) -> slice:
        """Where the scores of a layer's experts stand."""
        first = layer * self.experts
        return slice(first, first + self.experts)

    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Choose the lowest scores among `candidates`, lowest for the first of
        `incoming`.
        """
        victims = np.empty(len(incoming), np.int64)
        lowest_scores(candidates, self.score, self.tie, victims)
        return victims

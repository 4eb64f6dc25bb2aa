"""Caches that rank experts by a number: a base, and what such rules share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.arrays import zeros
from moesim.policies.base import CachePolicy
from moesim.policies.names import NONE

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.run_context import RunContext


class RankedCache(CachePolicy):
    """Evicts who has the lowest score, then the lowest tie, then the lowest key.

    Attributes:
        layers, experts: of the model.
        score, tie: float64 [L * E], by flat key; `tie` is `score` unless a rule has its
            own.
    """

    def start(self, context: RunContext) -> None:
        """Begin with scores of 0."""
        self.layers = context.shape.layers
        self.experts = context.shape.experts
        self.score: Floats = zeros(self.layers * self.experts)
        self.tie: Floats = self.score

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        lowest(candidates, self.score, self.tie, chosen)


def lowest(candidates: Ints, score: Floats, tie: Floats, best: Ints) -> None:
    """Find the candidates of lowest score, then lowest tie, then lowest key, lowest
    first.

    Args:
        candidates: int64 [C], ascending keys into `score` and `tie`.
        score, tie: float64, by flat key.
        best: int64 [M], to be filled in; -1 where C < M.
    """
    count = len(best)
    kept = 0
    for n in range(count):
        best[n] = NONE
    for c in range(len(candidates)):
        key = candidates[c]
        # Insertion into a short sorted list: few experts leave at a time. Candidates
        # ascend, so stopping at an equal one leaves the lower key in front.
        rank = kept
        while rank > 0:
            other = best[rank - 1]
            if score[key] > score[other]:
                break
            if score[key] == score[other] and tie[key] >= tie[other]:
                break
            rank -= 1
        if rank == count:
            continue
        kept = min(kept + 1, count)
        for j in range(kept - 1, rank, -1):
            best[j] = best[j - 1]
        best[rank] = key

"""Caches that rank experts by a number: a base, and what such rules share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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


class OutscoringCache(RankedCache):
    """As `RankedCache`, without a tie of its own, but keeps the best of residents and
    newcomers: who scores below all that it could replace is declined.
    """

    def start(self, context: RunContext) -> None:
        RankedCache.start(self, context)
        keys = self.layers * self.experts
        self.worst: Ints = zeros(keys, np.int64)
        self.order: Ints = zeros(keys, np.int64)

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        outscored(incoming, candidates, self.score, self.worst, self.order, chosen)


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


def by_descending_score(keys: Ints, score: Floats) -> None:
    """Sort a few `keys`, int64 [M], in place by descending score; equal ones keep their
    order.
    """
    for n in range(1, len(keys)):
        key = keys[n]
        rank = n
        while rank > 0 and score[key] > score[keys[rank - 1]]:
            keys[rank] = keys[rank - 1]
            rank -= 1
        keys[rank] = key


def outscored(
    incoming: Ints,
    candidates: Ints,
    score: Floats,
    worst: Ints,
    order: Ints,
    chosen: Ints,
) -> None:
    """Keep the best of `incoming` and `candidates`: the best incoming key meets the
    worst candidate, and so on; one that scores below its opponent is declined, an equal
    one admitted.

    Args:
        incoming: int64 [M].
        candidates: int64 [C], ascending.
        score: float64, by flat key.
        worst, order: int64, at least M places to work in.
        chosen: int64 [M], to be filled in with a victim for each incoming key; -1
            declines it.
    """
    count = len(incoming)
    worst = worst[:count]
    lowest(candidates, score, score, worst)
    # Positions of `incoming`, best first; a few, so by insertion.
    for n in range(count):
        chosen[n] = NONE
        key = incoming[n]
        rank = n
        while rank > 0 and score[key] > score[incoming[order[rank - 1]]]:
            order[rank] = order[rank - 1]
            rank -= 1
        order[rank] = n
    for n in range(count):
        key = incoming[order[n]]
        # Both lists are sorted: once a pair loses, all that follow lose too.
        if worst[n] < 0 or score[key] < score[worst[n]]:
            break
        chosen[order[n]] = worst[n]

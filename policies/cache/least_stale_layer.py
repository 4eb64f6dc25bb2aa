"""Least-Stale by layer, one of three public policies of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moesim.policies.parameters import expect_choice
from moesim.policies.ranked_cache import RankedCache, lowest

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

Order = Literal["lowest", "cyclic"]


class LeastStaleLayer(RankedCache):
    """Evict experts by the position of their layer alone; ties to the lower id.

    A layer that has had its turn needs its experts last. In per-layer scope it evicts
    the lowest id: it is made for the global scope.

    Args:
        order: ``lowest`` evicts the lowest layer, as the public code does, which is
            wrong for the experts of the coming layers at the start of a pass;
            ``cyclic`` evicts the layer whose turn is farthest ahead: the current one,
            then its predecessors, around to the next one.

    Source: "Least-Stale" as a public reimplementation has it, by layers alone; not
    SpecMD's, which is `moesim.policies.cache.least_stale_pass`.
    """

    def __init__(self, *, order: Order = "lowest") -> None:
        expect_choice("order", order, Order)
        self.cyclic = order == "cyclic"

    def start(self, context: RunContext) -> None:
        RankedCache.start(self, context)
        self.layer = 0

    def accessed(self, work: Work) -> None:
        self.layer = work.layer

    def rank(self, key: int) -> int:
        """The lowest is evicted first."""
        layer = key // self.experts
        if self.cyclic:
            return (self.layer - layer) % self.layers
        return layer

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        for c in range(len(candidates)):
            self.score[candidates[c]] = self.rank(candidates[c])
        lowest(candidates, self.score, self.score, chosen)

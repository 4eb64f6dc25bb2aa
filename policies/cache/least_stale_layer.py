"""Least-Stale by layer, one of three public policies of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moesim.policies.base import CachePolicy
from moesim.policies.parameters import expect_choice
from moesim.policies.ranking import lowest_first

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.base import LayerWork, RunContext

Order = Literal["lowest", "cyclic"]


class LeastStaleLayer(CachePolicy):
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
        self.order = order

    def start(self, context: RunContext) -> None:
        """Learn the number of layers."""
        self._layers = context.shape.layers
        self._experts = context.shape.experts
        self._layer = 0

    def accessed(self, work: LayerWork) -> None:
        """Note the current layer."""
        self._layer = work.layer

    def rank(self, candidates: np.ndarray) -> np.ndarray:
        """Numbers of the candidates, int64 [C]; the lowest are evicted first."""
        # Only the layer decides, so nothing is kept about single experts.
        layer = candidates // self._experts
        if self.order == "cyclic":
            layer = (self._layer - layer) % self._layers
        return layer

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Choose by layer."""
        # Within a layer candidates ascend, so ties go to the lower id.
        return lowest_first(candidates, self.rank(candidates))[: len(incoming)]

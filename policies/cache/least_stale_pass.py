"""Least-Stale by forward pass, one of three public policies of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import CachePolicy, flat_keys
from moesim.policies.parameters import expect_choice
from moesim.policies.ranking import lowest_first

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext

Order = Literal["lowest", "cyclic"]


class LeastStalePass(CachePolicy):
    """Evict experts that the current forward pass has neither used nor brought in, then
    the others; by layer.

    In per-layer scope all candidates share a layer, so only the pass and then the lower
    id decide: it is made for the global scope. A prefetched expert counts as touched,
    or it would leave before its use.

    Args:
        order: among equals, ``lowest`` evicts the lowest layer, as published;
            ``cyclic`` the layer whose turn is farthest ahead: the current one, then its
            predecessors, around to the next one. Ties go to the lower id.

    Source: SpecMD (arXiv 2602.03921), Least-Stale, as its abstract describes it.
    """

    def __init__(self, *, order: Order = "lowest") -> None:
        expect_choice("order", order, Order)
        self.order = order

    def start(self, context: RunContext) -> None:
        """Begin with nothing touched."""
        self._layers = context.shape.layers
        self._experts = context.shape.experts
        # The pass that touched each key last; -1 is none.
        keys = self._layers * self._experts
        self._touched = np.full(keys, -1, np.int64)
        self._step = 0
        self._layer = 0

    def accessed(self, work: LayerWork) -> None:
        """Note the pass of the active experts."""
        self._step = work.step
        self._layer = work.layer
        self._touched[flat_keys(work, self._experts)] = work.step

    def admitted(self, keys: np.ndarray) -> None:
        """Entering is a touch."""
        self._touched[keys] = self._step

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Choose the stale first, by layer."""
        layer = candidates // self._experts
        if self.order == "cyclic":
            layer = (self._layer - layer) % self._layers
        # More than any layer, so all stale experts rank before all touched ones.
        touched = self._touched[candidates] == self._step
        rank = layer + self._layers * touched
        return lowest_first(candidates, rank)[: len(incoming)]

"""Least-Stale by forward pass, one of three public policies of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import flat_keys
from moesim.policies.cache.least_stale_layer import LeastStaleLayer

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext


class LeastStalePass(LeastStaleLayer):
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

    def start(self, context: RunContext) -> None:
        """Begin with nothing touched."""
        super().start(context)
        # The pass that touched each key last; -1 is none.
        self._touched = np.full(self._layers * self._experts, -1, np.int64)
        self._step = 0

    def accessed(self, work: LayerWork) -> None:
        """Note the pass of the active experts."""
        super().accessed(work)
        self._step = work.step
        self._touched[flat_keys(work, self._experts)] = work.step

    def admitted(self, keys: np.ndarray) -> None:
        """Entering is a touch."""
        self._touched[keys] = self._step

    def rank(self, candidates: np.ndarray) -> np.ndarray:
        """The stale first, by layer."""
        touched = self._touched[candidates] == self._step
        # More than any layer, so all stale experts rank before all touched ones.
        return super().rank(candidates) + self._layers * touched

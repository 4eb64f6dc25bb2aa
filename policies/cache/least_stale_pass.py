"""Least-Stale by forward pass, one of three public policies of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import filled
from moesim.policies.cache.least_stale_layer import LeastStaleLayer
from moesim.policies.names import NONE

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext


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
        LeastStaleLayer.start(self, context)
        self.step = 0
        # The pass that touched each expert last.
        self.touched: Ints = filled(len(self.score), NONE, np.int64)

    def accessed(self, work: Work) -> None:
        LeastStaleLayer.accessed(self, work)
        self.step = work.step
        for i in range(work.active):
            self.touched[work.first + work.experts[i]] = work.step

    def admitted(self, key: int) -> None:
        self.touched[key] = self.step

    def rank(self, key: int) -> int:
        rank = LeastStaleLayer.rank(self, key)
        # More than any layer, so all stale experts rank before all touched ones.
        return rank + self.layers if self.touched[key] == self.step else rank

"""HybriMoE's prefetch as its released code does it: by recent scores, without a gate's
prediction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import ABSENT, PrefetchPolicy
from moesim.policies.cache.mrs import MRS
from moesim.policies.parameters import expect
from moesim.policies.prefetch._kernels import absent_experts
from moesim.policies.ranking import ranked
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import ExpertKey, LayerWork, MachineView, RunContext


class HybriMoEReleased(PrefetchPolicy):
    """Prefetch the next layer's experts of the highest minus-recent score, if this
    layer uses the GPU.

    The score is that of the `mrs` cache with the released constants, first row of the
    step included. "Uses the GPU" is read here as: an active expert is present. Decode
    only; the release preloads whole layers in prefill. Copies that are late are waited
    for; present experts use up their rank.

    Args:
        size: experts of the next layer; the release leaves it 0, off, unless
            configured.
        alpha: weight of the newest scores.

    Source: HybriMoE, `ktransformers/operators/experts.py` (the paper's own rule is
    `impact`).
    """

    needs = ("scores",)
    late = "wait"

    def __init__(self, *, size: int = 4, alpha: float = 0.5) -> None:
        expect(size >= 0, "size", "a number >= 0", size)
        self.size = size
        self._scores = MRS(alpha=alpha, first_row=True)

    def start(self, context: RunContext) -> None:
        """Begin with all scores 0."""
        self._scores.start(context)

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Note this layer's scores, then rank the next layer by what it had before."""
        # Every step counts into the scores, also where nothing is prefetched.
        self._scores.accessed(work)
        layer = work.layer + 1
        uses_gpu = (work.state != ABSENT).any()
        if layer >= view.layers or work.phase != Phase.DECODE or not uses_gpu:
            return ()

        first = layer * view.experts
        recent = self._scores.score[first : first + view.experts]
        # Experts that never had a score are not wanted.
        scored = np.count_nonzero(recent)
        return absent_experts(
            ranked(recent)[:scored],
            layer,
            view,
            size=self.size,
            refill=False,
        )

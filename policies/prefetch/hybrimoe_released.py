"""HybriMoE's prefetch as its released code does it: by recent scores, without a gate's
prediction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.base import PrefetchPolicy
from moesim.policies.cache.mrs import mix
from moesim.policies.names import ABSENT, DECODE
from moesim.policies.parameters import expect
from moesim.policies.prefetch._ranked import name_absent
from moesim.policies.ranking import best_of

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext


class HybriMoEReleased(PrefetchPolicy):
    """Prefetch the next layer's experts of the highest minus-recent score, if this
    layer uses the GPU.

    The score is that of the `mrs` cache with the released constants, first row of the
    step included. "Uses the GPU" is read here as: an active expert is present. Decode
    only; the release preloads whole layers in prefill. Present experts use up their
    rank.

    Args:
        size: experts of the next layer; the release leaves it 0, off, unless
            configured.
        alpha: weight of the newest scores.

    Source: HybriMoE, `ktransformers/operators/experts.py` (the paper's own rule is
    `impact`).
    """

    needs = ("scores",)
    reads_tokens = True

    def __init__(self, *, size: int = 4, alpha: float = 0.5) -> None:
        expect(size >= 0, "size", "a number >= 0", size)
        expect(0.0 < alpha <= 1.0, "alpha", "0 < alpha <= 1", alpha)
        self.size = size
        self.alpha = alpha

    def start(self, context: RunContext) -> None:
        """Begin with all scores 0."""
        shape = context.shape
        self.score: Floats = zeros(shape.layers * shape.experts)
        self.mixed: Ints = zeros(min(shape.experts, 2 * shape.top_k), np.int64)
        self.wanted: Ints = zeros(shape.experts, np.uint8)
        self.ranked: Ints = zeros(shape.experts, np.int64)

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        """Note this layer's scores, then rank the next layer by what it had before."""
        # Every step counts into the scores, also where nothing is prefetched.
        if len(work.first_scores):
            mix(self.score, work.first, work.first_scores, self.alpha, self.mixed)
        uses_gpu = False
        for i in range(work.active):
            uses_gpu = uses_gpu or work.state[i] != ABSENT
        layer = work.layer + 1
        if layer == view.layers or work.phase != DECODE or not uses_gpu:
            return 0
        first = layer * view.experts
        # Experts that never had a score are not wanted.
        for expert in range(view.experts):
            self.wanted[expert] = self.score[first + expert] > 0.0
        recent = self.score[first : first + view.experts]
        ranked = self.ranked[: best_of(recent, self.wanted, self.ranked)]
        return name_absent(view, layer, ranked, self.size, False, named, 0)

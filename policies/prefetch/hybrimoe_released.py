"""HybriMoE's prefetch as its released code does it: by recent scores, without a gate's
prediction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.base import ABSENT
from moesim.policies.cache.mrs import mix
from moesim.policies.compiled import CompiledPrefetch
from moesim.policies.kernels import (
    PREFETCH,
    KernelView,
    PrefetchKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect
from moesim.policies.prefetch._kernels import name_absent
from moesim.policies.ranking import best_of
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import RunContext


_DECODE = int(Phase.DECODE)


@compiled(PREFETCH)
def _by_recent_scores(
    state: State, work: Work, view: KernelView, named: np.ndarray
) -> int:
    """Note this layer's scores, then rank the next layer by what it had before. The
    state's integers: E, and ranked experts considered.
    """
    width = state.integers[0]
    first = work.layer * width
    # Every step counts into the scores, also where nothing is prefetched.
    if len(work.first_scores):
        average = state.scores[0][first : first + width]
        mix(average, work.first_scores, state.numbers[0], state.marks[0])
    uses_gpu = False
    for i in range(len(work.experts)):
        uses_gpu |= work.state[i] != ABSENT
    coming = first + width
    is_last = coming == state.scores.shape[1]
    if is_last or work.phase != _DECODE or not uses_gpu:
        return 0
    recent = state.scores[0][coming : coming + width]
    # Experts that never had a score are not wanted.
    order = best_of(recent, recent > 0.0, width)
    return name_absent(
        order, work.layer + 1, width, view.states, state.integers[1], False, named, 0
    )


class HybriMoEReleased(CompiledPrefetch):
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
    reads_tokens = True
    late = "wait"

    def __init__(self, *, size: int = 4, alpha: float = 0.5) -> None:
        expect(size >= 0, "size", "a number >= 0", size)
        expect(0.0 < alpha <= 1.0, "alpha", "0 < alpha <= 1", alpha)
        self.size = size
        self.alpha = alpha

    def start(self, context: RunContext) -> None:
        """Begin with all scores 0."""
        super().start(context)
        shape = context.shape
        top = min(shape.experts, 2 * shape.top_k)
        known = state(
            scores=np.zeros(shape.layers * shape.experts),
            marks=np.zeros(top),
            numbers=[self.alpha],
            integers=[shape.experts, self.size],
        )
        self.brought = PrefetchKernels(_by_recent_scores, known)

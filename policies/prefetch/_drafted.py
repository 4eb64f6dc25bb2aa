"""Base of prefetching by a draft: while tokens are drafted, the experts that the pass
which verifies them will use are copied.

No trace holds what a draft model knows of the target's experts. Here every expert of a
drafted token is known with a stated probability; otherwise another one, drawn at random
among those that the token does not use, is taken for it.

D drafted tokens, L MoE layers, E experts per layer, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.compiled import CompiledPrefetch
from moesim.policies.kernels import (
    FORETOLD,
    KernelView,
    PrefetchKernels,
    State,
    state,
)
from moesim.policies.parameters import expect
from moesim.policies.prefetch._kernels import is_present

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

_IN_TIME = -1


@compiled(FORETOLD)
def _foretold(
    state: State,
    predicted: np.ndarray,
    draft_s: float,
    view: KernelView,
    named: np.ndarray,
) -> int:
    """Name what is absent of the token's predicted experts, first layers first, as far
    as the cutoff, the state's first integer, or as copies can land in time.
    """
    cutoff = state.integers[0]
    experts = view.states.shape[1] // len(predicted)
    count = 0
    for layer in range(len(predicted)):
        reached = count
        for expert in predicted[layer]:
            key = layer * experts + expert
            if expert >= 0 and not is_present(view.states, key):
                named[reached] = key
                reached += 1
        if cutoff == _IN_TIME:
            landed_s = view.link_wait_s + reached * view.copy_s[layer]
            if landed_s > draft_s + layer * view.gap_s:
                break
        elif layer >= cutoff:
            break
        count = reached
    return count


class DraftedPrefetch(CompiledPrefetch):
    """Names the absent experts of a drafted token, layer by layer. Within the pass the
    draft has nothing new to say.

    The last token of a draft is not read by the model that drafts, so it foretells
    nothing.
    """

    oracle: ClassVar[bool] = True
    foretells_by_kernel: ClassVar[bool] = True
    late = "drop"

    def __init__(self, *, accuracy: float, cutoff: int | None) -> None:
        """Say how much a draft knows.

        Args:
            accuracy: share of a token's experts that are predicted right.
            cutoff: layers that are prefetched; None for those whose copies can have
                landed when their turn comes, at the earliest.
        """
        expect(0 <= accuracy <= 1, "accuracy", "0 to 1", accuracy)
        self.accuracy = accuracy
        known = state(integers=[_IN_TIME if cutoff is None else cutoff])
        self.brought = PrefetchKernels(state=known, foretold=_foretold)

    def start(self, context: RunContext) -> None:
        """Seed the errors."""
        super().start(context)
        self._experts = context.shape.experts
        self._random = np.random.default_rng(context.seed)

    def drafted(self, experts: np.ndarray) -> np.ndarray:
        """Draw what the draft takes for the experts of each token."""
        used = experts.astype(np.int64)
        tokens, layers, top_k = used.shape
        width = self._experts
        # Of one token after the other, whoever asks about how many at once.
        draws = self._random.random((tokens, layers * (top_k + width)))
        of_used = draws[:, : layers * top_k].reshape(used.shape)
        is_right = of_used < self.accuracy
        # The lowest of random numbers make a random choice of other experts.
        of_all = draws[:, layers * top_k :].reshape(tokens, layers, width)
        np.put_along_axis(of_all, used, np.inf, axis=2)
        others = of_all.argsort(axis=2)[..., :top_k]
        exists = np.take_along_axis(of_all, others, axis=2) < np.inf
        predicted = np.where(is_right, used, np.where(exists, others, -1))
        return predicted.astype(np.int32)

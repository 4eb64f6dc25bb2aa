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

from moesim.policies.base import PrefetchPolicy
from moesim.policies.parameters import expect
from moesim.policies.prefetch._ranked import is_present

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

_IN_TIME = -1


class DraftedPrefetch(PrefetchPolicy):
    """Names the absent experts of a drafted token, layer by layer. Within the pass the
    draft has nothing new to say.

    The last token of a draft is not read by the model that drafts, so it foretells
    nothing.
    """

    oracle: ClassVar[bool] = True
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
        self.until = _IN_TIME if cutoff is None else cutoff

    def start(self, context: RunContext) -> None:
        """Seed the errors."""
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

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        return 0

    def foretold(
        self, predicted: Ints, draft_s: float, view: MachineView, named: Ints
    ) -> int:
        """Name what is absent, first layers first, as far as the cutoff, or as copies
        can land in time.
        """
        count = 0
        for layer in range(len(predicted)):
            reached = count
            for n in range(predicted.shape[1]):
                expert = predicted[layer, n]
                key = layer * view.experts + expert
                if expert >= 0 and not is_present(view, key):
                    named[reached] = key
                    reached += 1
            if self.until == _IN_TIME:
                landed_s = view.link_wait_s + reached * view.copy_s[layer]
                if landed_s > draft_s + layer * view.gap_s:
                    break
            elif layer >= self.until:
                break
            count = reached
        return count

"""Base of prefetching by a draft: while tokens are drafted, the experts that the pass
which verifies them will use are copied.

No trace holds what a draft model knows of the target's experts. Here every expert of a
drafted token is known with a stated probability; otherwise another one, drawn at random
among those that the token does not use, is taken for it. L MoE layers, E experts per
layer, K experts per token.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.base import ExpertKey, PrefetchPolicy
from moesim.policies.parameters import expect
from moesim.policies.ranking import present

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView, RunContext


class DraftedPrefetch(PrefetchPolicy):
    """Names the absent experts of a drafted token, layer by layer, as far as `reaches`
    says.

    The last token of a draft is not read by the model that drafts, so it foretells
    nothing.
    """

    oracle: ClassVar[bool] = True
    late = "drop"

    def __init__(self, *, accuracy: float) -> None:
        expect(0 <= accuracy <= 1, "accuracy", "0 to 1", accuracy)
        self.accuracy = accuracy

    def start(self, context: RunContext) -> None:
        """Seed the errors."""
        self._random = np.random.default_rng(context.seed)

    def prefetch(self, work: LayerWork, view: MachineView) -> Sequence[ExpertKey]:
        """Name nothing: within the pass the draft has nothing new to say."""
        del work, view
        return ()

    def foretold(
        self, experts: np.ndarray, draft_s: float, view: MachineView
    ) -> Sequence[ExpertKey]:
        """Name what is absent of the token's predicted experts, first layers first."""
        named: list[ExpertKey] = []
        for layer, predicted in enumerate(self._predict(experts, view.experts)):
            absent = predicted[~present(view, layer)[predicted]]
            if not self.reaches(layer, len(named) + len(absent), draft_s, view):
                break
            named += [ExpertKey(layer, expert) for expert in absent.tolist()]
        return named

    @abstractmethod
    def reaches(
        self, layer: int, copies: int, draft_s: float, view: MachineView
    ) -> bool:
        """Whether a layer is prefetched, if that makes so many copies for one token."""

    def _predict(self, experts: np.ndarray, width: int) -> list[np.ndarray]:
        """Predicted experts of each layer, of those that are used, uint16 [L, K]."""
        layers, top_k = experts.shape
        used = experts.astype(np.int64)
        is_right = self._random.random(used.shape) < self.accuracy
        # The lowest of random numbers make a random choice of other experts.
        draws = self._random.random((layers, width))
        np.put_along_axis(draws, used, np.inf, axis=1)
        others = draws.argsort(axis=1)[:, :top_k]
        exists = np.take_along_axis(draws, others, axis=1) < np.inf
        predicted = np.where(is_right, used, others)
        return [
            row[keep] for row, keep in zip(predicted, is_right | exists, strict=True)
        ]

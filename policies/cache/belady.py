"""The clairvoyant bound: evict what is needed last."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from moesim.policies.base import PolicyError
from moesim.policies.cache._score_based import ScoredCache
from moesim.policies.kernels import foresee, outscored, soonest

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext


class Belady(ScoredCache):
    """Evict the expert whose next use, strictly after this layer step, lies farthest
    ahead.

    "Never again" is farthest; ties go to the lower id. In global scope a use's place is
    its step, then its layer. An expert's next use changes only when it is used, so the
    score (minus that place) is refreshed for the active experts alone, and prefetched
    ones need no bookkeeping. Where more experts come in than can enter, those that are
    needed soonest do.

    Args:
        must_admit: False may decline an expert whose next use is later than that of
            everything it could replace; it then runs from staging. That is the bound
            for a machine with staging. True is the textbook MIN, where each miss
            enters, as long as there is a place that nobody holds.

    Source: Belady 1966 (MIN); the step-atomic form is algorithms §5.5.
    """

    oracle: ClassVar[bool] = True

    def __init__(self, *, must_admit: bool = False) -> None:
        self.must_admit = must_admit

    def start(self, context: RunContext) -> None:
        """Look up the first use of every expert.

        Raises:
            PolicyError: the future is not available.
        """
        super().start(context)
        if context.future is None:
            raise PolicyError(
                "cache policy 'belady' must see the future; only a replay of a whole"
                " trace has one"
            )
        self._future = context.future
        self._layers = context.shape.layers
        every = np.arange(self.experts, dtype=np.int32)
        for layer in range(self._layers):
            self._look(-1, layer, every)

    def accessed(self, work: LayerWork) -> None:
        """Look up when the active experts come again."""
        self._look(work.step, work.layer, work.experts)

    def precedence(self, incoming: np.ndarray) -> np.ndarray:
        """Let in first who is needed first."""
        return soonest(incoming, self.score)

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Choose the farthest, or decline what would come back even later."""
        if self.must_admit:
            return super().victims(incoming, candidates)
        return outscored(incoming, candidates, self.score)

    def _look(self, step: int, layer: int, experts: np.ndarray) -> None:
        """Refresh the scores of `experts`, int32 [A]."""
        uses = self._future.next_uses(step, layer, experts)
        foresee(
            self.score,
            experts,
            uses,
            layer,
            self._layers,
            self.experts,
            self._future.never,
        )

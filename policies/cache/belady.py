"""Belady's clairvoyant cache, the bound for experts of equal size."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.cache._kernels import (
    by_descending_score,
    outscored_victims,
    score_next_uses,
)
from moesim.policies.cache._score_based import ScoreBasedCache

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext


class Belady(ScoreBasedCache):
    """Evict the expert whose next use lies farthest in the future.

    A next use is one strictly after this layer step. "Never again" is farthest; ties go
    to the lower id. In global scope the time of a use is its step, then its layer. An
    expert's next use changes only when it is used, so the score (minus that time) is
    refreshed for the active experts alone, and prefetched ones need no bookkeeping.
    Where more experts come in than can enter, those that are needed soonest do.

    Args:
        must_admit: False may decline an expert whose next use is later than that of
            everything it could replace; it then runs from staging. That is the bound
            for a machine with staging. True is the textbook MIN, where each miss
            enters, as long as there is a resident that is not held.

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
        every_expert = np.arange(self.experts, dtype=np.int32)
        for layer in range(self._layers):
            # Strictly after step -1 is from the very first step on.
            self._refresh(-1, layer, every_expert)

    def accessed(self, work: LayerWork) -> None:
        """Look up when the active experts come again."""
        self._refresh(work.step, work.layer, work.experts)

    def precedence(self, incoming: np.ndarray) -> np.ndarray:
        """Admit first what is needed first."""
        return by_descending_score(incoming, self.score)

    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Choose the farthest, or decline what would come back even later."""
        # The base only compares candidates with each other.
        if self.must_admit:
            return super().victims(incoming, candidates)
        return outscored_victims(incoming, candidates, self.score)

    def _refresh(
        self,
        step: int,
        layer: int,
        experts: np.ndarray,
    ) -> None:
        """Score `experts`, int32 [A], by their next uses after `step`."""
        score_next_uses(
            self.score[self.keys_of(layer)],
            experts,
            self._future.next_uses(step, layer, experts),
            layer,
            self._layers,
            self._future.never,
        )

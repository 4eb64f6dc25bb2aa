"""Cache-prior routing: resident experts gain a share of the logits' range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import RoutingPolicy
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import present, ranked
from moesim.policies.routing._substitute import (
    chosen_mask,
    routing,
    scores_of,
    values_at,
)

if TYPE_CHECKING:
    from moesim.policies.base import Gate, MachineView, Routing, RunContext

Scale = Literal["mean", "token"]

# A recorded score of 0 stands for anything below this.
_SMALLEST = float(np.finfo(np.float16).smallest_subnormal)

# Added to the logits of recorded experts: more than rounding, less than any difference
# of two float16 scores.
_TIE_BONUS = 1e-9


class CachePrior(RoutingPolicy):
    """Add a share of the logits' range to resident experts, then take the top k again.

    A confident gate is left alone; where experts nearly tie, residents win. Every
    expert counts with its own, unraised score. Only residents can enter: nothing else
    has gained. Logits are recovered from the scores, whose unknown constant cancels in
    a range.

    Args:
        strength: the share, lambda in the paper.
        top_j: so many of each token's best experts always stay.
        scale: the range is the ``mean`` over all tokens the layer has seen (the paper's
            running estimate), or each ``token``'s own, as an independent implementation
            (BigMoeOnEdge) has it; that one needs no memory.

    Source: arXiv 2412.00099, cache-prior; by definition able to beat Belady's bound, as
    accesses change.
    """

    needs = ("scores",)

    def __init__(
        self,
        *,
        strength: float = 0.2,
        top_j: int = 1,
        scale: Scale = "mean",
    ) -> None:
        expect(strength >= 0, "strength", "a number >= 0", strength)
        expect(top_j >= 0, "top_j", "a number >= 0", top_j)
        expect_choice("scale", scale, Scale)
        self.strength = strength
        self.top_j = top_j
        self.scale = scale

    def start(self, context: RunContext) -> None:
        """Begin with no ranges seen."""
        self._sum = np.zeros(context.shape.layers)
        self._seen = np.zeros(context.shape.layers)
        self._sigmoid = context.shape.scoring == "sigmoid"

    def route(
        self,
        gate: Gate,
        view: MachineView,
    ) -> Routing:
        """Rank the recorded experts and the residents again; ties stay with the
        recorded ones.
        """
        logits = self._logits(scores_of(gate))
        recorded = gate.experts.astype(np.int64)
        top_k = recorded.shape[1]
        chosen = chosen_mask(recorded, view.experts)
        resident = present(view, gate.layer, in_flight=False)

        # The first `top_j` gain as much as residents, so no resident can overtake them.
        first = recorded[:, : self.top_j]
        shielded = chosen_mask(first, view.experts)
        raised = resident | shielded
        bonus = self.strength * self._range(gate.layer, logits)
        value = logits + bonus * raised + _TIE_BONUS * chosen
        best = ranked(value, among=chosen | resident)[:, :top_k]
        best = np.sort(best, axis=1)

        # A token whose set is the same keeps the recorded order, too.
        recorded_set = np.sort(recorded, axis=1)
        same = (best == recorded_set).all(axis=1, keepdims=True)
        by_score = ranked(values_at(logits, best))
        best_first = values_at(best, by_score)
        experts = np.where(same, recorded, best_first)
        return routing(gate, experts, view)

    def _logits(self, scores: np.ndarray) -> np.ndarray:
        """Logits up to a constant, float64 [T, E]."""
        scores = np.maximum(scores, _SMALLEST)
        if self._sigmoid:
            others = np.maximum(1 - scores, _SMALLEST)
            return np.log(scores / others)
        return np.log(scores)

    def _range(
        self,
        layer: int,
        logits: np.ndarray,
    ) -> np.ndarray:
        """Range of the logits: float64 [T, 1], or [1, 1] for the layer's mean, these
        tokens included.
        """
        spread = np.ptp(logits, axis=1, keepdims=True)
        if self.scale == "token":
            return spread
        self._sum[layer] += spread.sum()
        self._seen[layer] += len(spread)
        mean = self._sum[layer] / self._seen[layer]
        return np.array([[mean]])

"""Cache-prior routing: resident experts gain a share of the logits' range."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.kernels import ROUTE, GateWork, RoutingKernels, State, state
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import best_of
from moesim.policies.routing._substitute import (
    SubstitutingRouting,
    chosen_by,
    on_gpu,
)

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

Scale = Literal["mean", "token"]

# A recorded score of 0 stands for anything below this.
_SMALLEST = float(np.finfo(np.float16).smallest_subnormal)

# Added to the logits of recorded experts: more than rounding, less than any difference
# of two float16 scores.
_TIE_BONUS = 1e-9


# Rows of the state's scores, by layer.
_SUM = 0
_SEEN = 1


@compiled
def _logit(score: float, by_sigmoid: bool) -> float:
    """A logit up to a constant that all experts of a token share."""
    score = max(score, _SMALLEST)
    if by_sigmoid:
        return math.log(score / max(1.0 - score, _SMALLEST))
    return math.log(score)


@compiled(ROUTE)
def _route(state: State, gate: GateWork, routing: np.ndarray) -> int:
    """Rank the recorded experts and the residents again; ties stay with the recorded
    ones. The state's integers: `top_j`, whether the range is a mean, whether scores are
    sigmoids.
    """
    top_j, by_mean, by_sigmoid = state.integers
    tokens, width = gate.scores.shape
    top_k = gate.experts.shape[1]
    logits = np.empty((tokens, width))
    ranges = np.empty(tokens)
    for t in range(tokens):
        for expert in range(width):
            logits[t, expert] = _logit(gate.scores[t, expert], by_sigmoid != 0)
        ranges[t] = logits[t].max() - logits[t].min()
        state.scores[_SUM, gate.layer] += ranges[t]
        state.scores[_SEEN, gate.layer] += 1.0
    mean = state.scores[_SUM, gate.layer] / state.scores[_SEEN, gate.layer]

    resident = on_gpu(gate, width, False)
    value = np.empty(width)
    among = np.empty(width, np.bool_)
    for t in range(tokens):
        bonus = state.numbers[0] * (mean if by_mean else ranges[t])
        recorded = chosen_by(gate.experts[t], width)
        # The first gain as much as residents, so no resident can overtake them.
        first = chosen_by(gate.experts[t, :top_j], width)
        for expert in range(width):
            among[expert] = recorded[expert] or resident[expert]
            value[expert] = logits[t, expert]
            if resident[expert] or first[expert]:
                value[expert] += bonus
            if recorded[expert]:
                value[expert] += _TIE_BONUS
        best = chosen_by(best_of(value, among, top_k), width)
        same = True
        for expert in gate.experts[t]:
            same &= best[expert]
        # A token whose set is the same keeps the recorded order, too.
        in_order = best_of(logits[t], best, top_k)
        for column in range(top_k):
            expert = in_order[column]
            routing[t * top_k + column] = gate.experts[t, column] if same else expert
    return top_k


class CachePrior(SubstitutingRouting):
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
        shape = context.shape
        rules = (self.top_j, self.scale == "mean", shape.scoring == "sigmoid")
        known = state(
            scores=np.zeros((2, shape.layers)),
            numbers=[self.strength],
            integers=rules,
        )
        self.brought = RoutingKernels(_route, known)

"""Cache-prior routing: resident experts gain a share of the logits' range."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import best_of
from moesim.policies.routing._substitute import SubstitutingRouting

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Gate, MachineView
    from moesim.policies.run_context import RunContext

Scale = Literal["mean", "token"]

# A recorded score of 0 stands for anything below this.
SMALLEST_SCORE = float(np.finfo(np.float16).smallest_subnormal)

# Added to the logits of recorded experts: more than rounding, less than any difference
# of two float16 scores.
TIE_BONUS = 1e-9


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
        self.by_mean = scale == "mean"

    def start(self, context: RunContext) -> None:
        """Begin with no ranges seen."""
        SubstitutingRouting.start(self, context)
        shape = context.shape
        self.width = shape.experts
        self.by_sigmoid = shape.scoring == "sigmoid"
        self.range_sum: Floats = zeros(shape.layers)
        self.range_count: Floats = zeros(shape.layers)
        self.among: Ints = zeros(shape.experts, np.uint8)
        self.first: Ints = zeros(shape.experts, np.uint8)
        self.best: Ints = zeros(shape.experts, np.int64)
        self.value: Floats = zeros(shape.experts)
        self._make_room(1)

    def _make_room(self, rows: int) -> None:
        """Room for so many tokens."""
        self.logits: Floats = zeros((rows, self.width))
        self.ranges: Floats = zeros(rows)

    def route(self, gate: Gate, view: MachineView, routing: Ints) -> int:
        """Rank the recorded experts and the residents again; ties stay with the
        recorded ones.
        """
        if gate.rows > len(self.ranges):
            self._make_room(2 * gate.rows)
        top_k = gate.experts.shape[1]  # type: ignore[index]
        self._read_logits(gate)
        mean = self.range_sum[gate.layer] / self.range_count[gate.layer]
        self.token.look(view, gate.layer, False)
        for t in range(gate.rows):
            bonus = self.strength * (mean if self.by_mean else self.ranges[t])
            self._choose(gate, t, top_k, bonus)
            same = True
            for column in range(top_k):
                same = same and self.token.chosen[gate.experts[t, column]] != 0
            for column in range(top_k):
                # A token whose set is the same keeps the recorded order, too.
                if same:
                    routing[t * top_k + column] = gate.experts[t, column]
                else:
                    routing[t * top_k + column] = self.best[column]
        return top_k

    def _read_logits(self, gate: Gate) -> None:
        """Note the tokens' logits and their ranges."""
        for t in range(gate.rows):
            least = most = self._logit(gate.scores[t, 0])
            for expert in range(self.width):
                logit = self._logit(gate.scores[t, expert])
                self.logits[t, expert] = logit
                least = min(least, logit)
                most = max(most, logit)
            self.ranges[t] = most - least
            self.range_sum[gate.layer] += most - least
            self.range_count[gate.layer] += 1.0

    def _logit(self, score: float) -> float:
        """A logit up to a constant that all experts of a token share."""
        score = max(score, SMALLEST_SCORE)
        if self.by_sigmoid:
            return math.log(score / max(1.0 - score, SMALLEST_SCORE))
        return math.log(score)

    def _choose(self, gate: Gate, t: int, top_k: int, bonus: float) -> None:
        """Leave a token's experts in the token's `chosen`, and in `best` by logit."""
        token = self.token
        token.take(gate.experts, t)
        token.mark()
        for expert in range(self.width):
            self.first[expert] = 0
        # The first gain as much as residents, so no resident can overtake them.
        for column in range(min(self.top_j, top_k)):
            self.first[token.experts[column]] = 1
        for expert in range(self.width):
            recorded = token.chosen[expert]
            resident = token.present[expert]
            self.among[expert] = recorded or resident
            value = self.logits[t, expert]
            if resident or self.first[expert]:
                value += bonus
            if recorded:
                value += TIE_BONUS
            self.value[expert] = value
            token.score[expert] = self.logits[t, expert]
        token.count = best_of(self.value, self.among, token.experts[:top_k])
        token.mark()
        best_of(token.score, token.chosen, self.best[:top_k])

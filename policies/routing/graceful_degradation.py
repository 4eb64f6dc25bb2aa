"""DAOP's graceful degradation: at most one absent expert per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.names import DECODE
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.routing._substitute import SubstitutingRouting, weights_of

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Gate, MachineView

Choice = Literal["predicted", "gate"]


class GracefulDegradation(SubstitutingRouting):
    """Keep the best of a token's absent experts; replace the others by the next-best
    residents.

    With two experts: if both are on the CPU, the lower one is dropped for the best
    expert on the GPU, and the weights are formed from the two scores, as the model
    forms its own: the source's p / (p1 + p2) is Mixtral's way, and a model that does
    not normalise would get larger outputs than it ever had. Where too few experts are
    resident the best absent ones stay. Decode only; for more than two experts per token
    the rule above is our extension.

    Args:
        first_layer: layers below it run on demand with their own gate, and keep their
            experts.
        choice: ``predicted`` degrades what the layer before predicted, because DAOP
            never evaluates the true gate of a predicted layer; ``gate`` degrades the
            true gate's choice, to see the rule alone.

    Source: DAOP, section on graceful degradation; 5 is its code's
    `first_predict_layer`.
    """

    def __init__(self, *, first_layer: int = 5, choice: Choice = "predicted") -> None:
        expect(first_layer >= 0, "first_layer", "a number >= 0", first_layer)
        expect_choice("choice", choice, Choice)
        self.first_layer = first_layer
        self.by_prediction = choice == "predicted"
        if self.by_prediction:
            self.needs = ("scores", "pred1_raw")

    def route(self, gate: Gate, view: MachineView, routing: Ints) -> int:
        if gate.layer < self.first_layer or gate.phase != DECODE:
            return 0
        # Layer 0 is predicted by none, so even here a prediction may be missing.
        predicted = self.by_prediction and len(gate.predicted) > 0
        top_k = gate.experts.shape[1]  # type: ignore[index]
        token = self.token
        token.look(view, gate.layer, False)
        for t in range(gate.rows):
            if predicted:
                token.read(gate.predicted, t)
                token.choose(top_k)
            else:
                token.read(gate.scores, t)
                token.take(gate.experts, t)
            token.keep_one_absent()
            for column in range(top_k):
                routing[t * top_k + column] = token.experts[column]
        return top_k

    def weigh(self, gate: Gate, experts: np.ndarray) -> np.ndarray:
        """Weigh by the scores that have chosen."""
        scores = np.asarray(gate.scores)
        predicted = self.by_prediction and len(gate.predicted) > 0
        if predicted:
            scores = np.asarray(gate.predicted)
        return weights_of(
            gate, experts, scores, self.normalises, gate_spoke=not predicted
        )

"""DAOP's graceful degradation: at most one absent expert per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.kernels import ROUTE, GateWork, RoutingKernels, State, state
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import best_of
from moesim.policies.routing._substitute import (
    SubstitutingRouting,
    keep_one_absent,
    on_gpu,
    routing,
)
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import Gate, MachineView, Routing


Choice = Literal["predicted", "gate"]


_DECODE = int(Phase.DECODE)


@compiled(ROUTE)
def _route(state: State, gate: GateWork, routing: np.ndarray) -> int:
    """Degrade a decode step from the first layer on, the state's first integer; the
    other one says whether the layer before predicts the choice.
    """
    if gate.layer < state.integers[0] or gate.phase != _DECODE:
        return 0
    # Layer 0 is predicted by none, so even here a prediction may be missing.
    by_prediction = state.integers[1] != 0 and len(gate.predicted) > 0
    top_k = gate.experts.shape[1]
    width = gate.scores.shape[1]
    resident = on_gpu(gate, width, False)
    every = np.ones(width, np.bool_)
    for t in range(len(gate.experts)):
        scores = gate.scores[t]
        experts = np.empty(top_k, np.int64)
        if by_prediction:
            scores = gate.predicted[t]
            experts = best_of(scores, every, top_k)
        else:
            for column in range(top_k):
                experts[column] = gate.experts[t, column]
        keep_one_absent(experts, scores, resident)
        for column in range(top_k):
            routing[t * top_k + column] = experts[column]
    return top_k


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
        self.choice = choice
        if choice == "predicted":
            self.needs = ("scores", "pred1_raw")
        rules = (first_layer, choice == "predicted")
        self.brought = RoutingKernels(_route, state(integers=rules))

    def weigh(self, gate: Gate, experts: np.ndarray, view: MachineView) -> Routing:
        """Weigh by the scores that have chosen."""
        predicted = gate.predicted if self.choice == "predicted" else None
        return routing(gate, experts, view, predicted=predicted)

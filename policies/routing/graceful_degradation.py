"""DAOP's graceful degradation: at most one absent expert per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import Routing, RoutingPolicy
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import present, ranked
from moesim.policies.routing._substitute import (
    keep_one_absent,
    routing,
    scores_of,
)
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import Gate, MachineView


Choice = Literal["predicted", "gate"]


class GracefulDegradation(RoutingPolicy):
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
        self.needs: tuple[str, ...] = ("scores",)
        if choice == "predicted":
            self.needs = ("scores", "pred1_raw")

    def route(
        self,
        gate: Gate,
        view: MachineView,
    ) -> Routing:
        """Degrade a decode step of a predicted layer."""
        predicted_layer = gate.layer >= self.first_layer
        if not predicted_layer or gate.phase != Phase.DECODE:
            return Routing(gate.experts, gate.weights)

        # Layer 0 is predicted by none, so even here a prediction may be missing.
        predicted = gate.predicted if self.choice == "predicted" else None
        scores = scores_of(gate)
        experts = gate.experts.astype(np.int64)
        if predicted is not None:
            top_k = experts.shape[1]
            scores = predicted.astype(np.float64)
            experts = ranked(scores)[:, :top_k]

        resident = present(view, gate.layer, in_flight=False)
        experts = keep_one_absent(experts, scores, resident)
        return routing(gate, experts, view, predicted=predicted)

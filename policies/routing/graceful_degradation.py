"""DAOP's graceful degradation: never wait for more than one absent expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from moesim.policies.base import Routing, RoutingPolicy
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.planner.resident_mask import present
from moesim.policies.routing._substitute import (
    chosen_mask,
    routing,
    scores_of,
    substitute,
)
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import Gate, MachineView


Choice = Literal["predicted", "gate"]


class GracefulDegradation(RoutingPolicy):
    """Of a token's absent experts keep the best; the next-best residents take the
    others' places.

    With two experts: if both are on the CPU, the lower one is dropped for the best
    expert on the GPU, and the weights are formed from the two scores, as the model
    forms its own: the source's p / (p1 + p2) is Mixtral's way, and a model that does
    not normalise would be louder than it ever was. Where too few experts are resident
    the best absent ones stay. Decode only; for more than two experts per token the rule
    above is our extension.

    Args:
        first_layer: layers below it run on demand with their own gate, and keep their
            experts.
        choice: ``predicted`` degrades what the layer before predicted, because DAOP
            never asks the true gate of a predicted layer; ``gate`` degrades the true
            gate's choice, to see the rule alone.

    Source: DAOP, section on graceful degradation; 5 is its code's
    `first_predict_layer`.
    """

    def __init__(self, *, first_layer: int = 5, choice: Choice = "predicted") -> None:
        expect(first_layer >= 0, "first_layer", "a number >= 0", first_layer)
        expect_choice("choice", choice, Choice)
        self.first_layer = first_layer
        self.choice = choice
        self.needs = ("scores", "pred1_raw") if choice == "predicted" else ("scores",)

    def route(self, gate: Gate, view: MachineView) -> Routing:
        """Degrade a decode step of a predicted layer."""
        if gate.layer < self.first_layer or gate.phase != Phase.DECODE:
            return Routing(gate.experts, gate.weights)
        said = gate.predicted if self.choice == "predicted" else None
        scores = scores_of(gate)
        wanted = gate.experts.astype(np.int64)
        if said is not None:
            scores = said.astype(np.float64)
            wanted = np.argsort(-scores, axis=1, kind="stable")[:, : wanted.shape[1]]
        resident = present(view, gate.layer, in_flight=False)
        absent = ~resident[wanted]
        further = absent & (np.cumsum(absent, axis=1) > 1)
        free = resident & ~chosen_mask(wanted, view.experts)
        experts = substitute(wanted, further, np.where(free, scores, -np.inf))
        return routing(gate, experts, view, said=said)

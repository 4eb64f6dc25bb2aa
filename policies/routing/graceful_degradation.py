"""DAOP's graceful degradation: never wait for more than one absent expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from policies.base import Routing, RoutingPolicy
from policies.parameters import expect, expect_choice
from policies.presence import present
from policies.routing._substitute import chosen_mask, routing, scores_of, substitute
from traces.schema import Phase

if TYPE_CHECKING:
    from policies.base import Gate, MachineView


Choice = Literal["predicted", "gate"]


class GracefulDegradation(RoutingPolicy):
    """Of a token's absent experts keep the best; the next-best residents take the others' places.

    With two experts: if both are on the CPU, the lower one is dropped for the best expert on the GPU, and
    the weights are formed from the two scores. Where too few experts are resident the best absent ones stay. Decode
    only; for more than two experts per token the rule above is our extension.

    Args:
        first_layer: layers below it run on demand with their own gate, and keep their experts.
        choice: ``predicted`` degrades what the layer before predicted, because DAOP never asks the true gate of a
            predicted layer; ``gate`` degrades the true gate's choice, to see the rule alone.

    Source: DAOP, section on graceful degradation; 5 is its code's `first_predict_layer`.
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
        if self.choice == "predicted" and gate.predicted is not None:
            gate = _as_predicted(gate, gate.predicted)
        resident = present(view, gate.layer, in_flight=False)
        recorded = gate.experts.astype(np.int64)
        absent = ~resident[recorded]
        further = absent & (np.cumsum(absent, axis=1) > 1)
        free = resident & ~chosen_mask(recorded, view.experts)
        experts = substitute(recorded, further, np.where(free, scores_of(gate), -np.inf))
        return routing(gate, experts, view)


def _as_predicted(gate: Gate, scores: np.ndarray) -> Gate:
    """The gate as if the prediction were its word: its top-k, with its scores, renormalised over them, as weights."""
    k = gate.experts.shape[1]
    experts = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")[:, :k]
    chosen = np.take_along_axis(scores.astype(np.float64), experts, axis=1)
    weights = chosen / np.maximum(chosen.sum(axis=1, keepdims=True), 1e-30)
    return gate._replace(experts=experts.astype(np.uint16), scores=scores, weights=weights.astype(np.float16))

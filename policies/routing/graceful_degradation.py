"""DAOP's graceful degradation: never wait for more than one absent expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policies.base import Routing, RoutingPolicy
from policies.parameters import expect
from policies.presence import present
from policies.routing._substitute import chosen_mask, routing, scores_of, substitute
from traces.schema import Phase

if TYPE_CHECKING:
    from policies.base import Gate, MachineView


class GracefulDegradation(RoutingPolicy):
    """Of a token's absent experts keep the best; the next-best residents take the others' places.

    With two experts: if both are on the CPU, the lower one is dropped for the best expert on the GPU, and
    the weights are formed from the two scores. Where too few experts are resident the best absent ones stay. Decode
    only; for more than two experts per token the rule above is our extension.

    The paper degrades *predicted* choices, as the true gate of a predicted layer is never asked; here the true gate's
    scores are degraded, because a routing policy sees no prediction.

    Args:
        first_layer: layers below it run on demand with their own gate, and keep their experts.

    Source: DAOP, section on graceful degradation; 5 is its code's `first_predict_layer`.
    """

    needs = ("scores",)

    def __init__(self, *, first_layer: int = 5) -> None:
        expect(first_layer >= 0, "first_layer", "a number >= 0", first_layer)
        self.first_layer = first_layer

    def route(self, gate: Gate, view: MachineView) -> Routing:
        """Degrade a decode step of a predicted layer."""
        if gate.layer < self.first_layer or gate.phase != Phase.DECODE:
            return Routing(gate.experts, gate.weights)
        resident = present(view, gate.layer, in_flight=False)
        recorded = gate.experts.astype(np.int64)
        absent = ~resident[recorded]
        further = absent & (np.cumsum(absent, axis=1) > 1)
        free = resident & ~chosen_mask(recorded, view.experts)
        experts = substitute(recorded, further, np.where(free, scores_of(gate), -np.inf))
        return routing(gate, experts, view)

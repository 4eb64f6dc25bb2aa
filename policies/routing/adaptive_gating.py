"""AdapMoE's adaptive gating: fewer experts per token in insensitive layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.base import PolicyError, Routing
from moesim.policies.compiled import CompiledRouting
from moesim.policies.kernels import (
    ROUTE,
    UNUSED,
    GateWork,
    RoutingKernels,
    State,
    state,
)
from moesim.policies.parameters import expect
from moesim.policies.routing._substitute import SMALLEST
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import Gate, MachineView, RunContext


_DECODE = int(Phase.DECODE)


@compiled(ROUTE)
def _route(state: State, gate: GateWork, routing: np.ndarray) -> int:
    """Drop what weighs less than the layer's threshold, the state's number of it."""
    if gate.phase != _DECODE:
        return 0
    top_k = gate.experts.shape[1]
    drops = False
    for t in range(len(gate.experts)):
        total = 0.0
        for weight in gate.weights[t]:
            total += weight
        for column in range(top_k):
            dropped = gate.weights[t, column] < state.numbers[gate.layer] * total
            # The best expert stays, however small its share.
            if dropped and column:
                drops = True
                routing[t * top_k + column] = UNUSED
            else:
                routing[t * top_k + column] = gate.experts[t, column]
    return top_k if drops else 0


class AdaptiveGating(CompiledRouting):
    """Drop every expert but a token's best whose share of the weight is below the
    layer's threshold.

    The threshold is ``sqrt(budget / sensitivity of the layer)``. Decode only. The
    source drops the second of two, and only while a single token is decoded; for more
    experts per token, and in batches, the same rule holds for each expert and token
    (ours). What remains is scaled up to the recorded sum where the model normalises
    over the top k.

    Args:
        budget: the loss a layer may add.
        sensitivity: of every layer, where the calibration holds none
            (``extras["sensitivity"]``, float [L]). The default is the median that
            AdapMoE's code gives for Mixtral's 32 layers, which span 0.02 to 47; with it
            experts below 14 % are dropped.

    Source: AdapMoE, `run.py` and `src/custom_layers.py`.
    """

    needs = ("weights",)

    def __init__(self, *, budget: float = 0.005, sensitivity: float = 0.27) -> None:
        expect(budget >= 0, "budget", "a number >= 0", budget)
        expect(sensitivity > 0, "sensitivity", "a number > 0", sensitivity)
        self.budget = budget
        self.sensitivity = sensitivity

    def start(self, context: RunContext) -> None:
        """Take the layers' sensitivities from the calibration if it holds them.

        Raises:
            PolicyError: they are not one positive number for each layer.
        """
        layers = context.shape.layers
        uniform = np.full(layers, self.sensitivity)
        sensitivity = context.extras.get("sensitivity", uniform)
        sensitivity = np.asarray(sensitivity, np.float64)
        is_legal = sensitivity.shape == (layers,) and (sensitivity > 0).all()
        if not is_legal:
            raise PolicyError(
                "routing policy 'adaptive-gating': calibration 'sensitivity': expected"
                f" {layers} positive numbers, one for each MoE layer, got shape"
                f" {sensitivity.shape}"
            )
        threshold = np.sqrt(self.budget / sensitivity)
        self.brought = RoutingKernels(_route, state(numbers=threshold))

    def weigh(self, gate: Gate, experts: np.ndarray, view: MachineView) -> Routing:
        """Scale up what remains, where the model normalises."""
        assert gate.weights is not None, (
            "a policy that needs weights was started without them"
        )
        weights = gate.weights.astype(np.float64)
        kept = np.where(experts == UNUSED, 0.0, weights)
        if view.shape.norm_topk:
            total = weights.sum(axis=1, keepdims=True)
            left = kept.sum(axis=1, keepdims=True)
            kept *= total / np.maximum(left, SMALLEST)
        return Routing(experts, kept.astype(np.float32))

"""AdapMoE's adaptive gating: fewer experts per token in insensitive layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import view_of
from moesim.policies.base import PolicyError, RoutingPolicy
from moesim.policies.names import DECODE, UNUSED
from moesim.policies.parameters import expect
from moesim.policies.routing._substitute import SMALLEST

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Gate, MachineView
    from moesim.policies.run_context import RunContext


class AdaptiveGating(RoutingPolicy):
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

    reads_tokens = True
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
        self.normalises = context.shape.norm_topk
        threshold = np.sqrt(self.budget / sensitivity)
        self.threshold: Floats = view_of(threshold, np.float64)

    def route(self, gate: Gate, view: MachineView, routing: Ints) -> int:
        if gate.phase != DECODE:
            return 0
        top_k = gate.experts.shape[1]  # type: ignore[index]
        threshold = self.threshold[gate.layer]
        drops = False
        for t in range(gate.rows):
            total = 0.0
            for column in range(top_k):
                total += gate.weights[t, column]
            for column in range(top_k):
                # The best expert stays, however small its share.
                if column and gate.weights[t, column] < threshold * total:
                    drops = True
                    routing[t * top_k + column] = UNUSED
                else:
                    routing[t * top_k + column] = gate.experts[t, column]
        return top_k if drops else 0

    def weigh(self, gate: Gate, experts: np.ndarray) -> np.ndarray:
        """Scale up what remains, where the model normalises."""
        weights = np.asarray(gate.weights)
        kept = np.where(experts == UNUSED, 0.0, weights)
        if self.normalises:
            total = weights.sum(axis=1, keepdims=True)
            left = kept.sum(axis=1, keepdims=True)
            kept *= total / np.maximum(left, SMALLEST)
        return kept.astype(np.float32)

"""AdapMoE's adaptive gating: fewer experts per token in insensitive layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import PolicyError, Routing, RoutingPolicy
from moesim.policies.parameters import expect
from moesim.policies.routing._substitute import SMALLEST, UNUSED
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import Gate, MachineView, RunContext


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

    needs = ("weights",)

    def __init__(self, *, budget: float = 0.005, sensitivity: float = 0.27) -> None:
        expect(budget >= 0, "budget", "a number >= 0", budget)
        expect(sensitivity > 0, "sensitivity", "a number > 0", sensitivity)
        self.budget = budget
        self.sensitivity = sensitivity
        self._threshold: np.ndarray | None = None

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
        self._threshold = np.sqrt(self.budget / sensitivity)

    def route(
        self,
        gate: Gate,
        view: MachineView,
    ) -> Routing:
        """Drop experts of a decode step."""
        assert self._threshold is not None, "route() before start()"
        assert gate.weights is not None, (
            "a policy that needs weights was started without them"
        )
        if gate.phase != Phase.DECODE:
            return Routing(gate.experts, gate.weights)

        weights = gate.weights.astype(np.float64)
        total = weights.sum(axis=1, keepdims=True)
        dropped = weights < self._threshold[gate.layer] * total
        # The best expert stays, however small its share.
        dropped[:, 0] = False
        if not dropped.any():
            return Routing(gate.experts, gate.weights)

        kept = np.where(dropped, 0.0, weights)
        if view.shape.norm_topk:
            left = kept.sum(axis=1, keepdims=True)
            kept *= total / np.maximum(left, SMALLEST)
        experts = np.where(dropped, UNUSED, gate.experts)
        return Routing(
            experts=experts.astype(np.uint16),
            weights=kept.astype(np.float32),
        )

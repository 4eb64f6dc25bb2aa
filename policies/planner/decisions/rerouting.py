"""Rerouting: a routing policy that alters it chooses the experts of every token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import Gate
from moesim.policies.planner.gate_mass import gate_mass_kept, weight_kept

if TYPE_CHECKING:
    from moesim.policies.planner.machine_state import MachineState
    from moesim.traces.format.batch import RoutedLayer
    from moesim.traces.format.schema import Phase


class Rerouting:
    """Asks the routing policy of a run.

    Attributes:
        gate_mass: share of the gate's weight that altered routing kept, by layer step.
    """

    def __init__(self) -> None:
        self.gate_mass: list[float] = []
        # Step and layer whose gate was asked one layer earlier, and its answer.
        self._predicted: tuple[int, int, np.ndarray | None] = (-1, -1, None)

    def route(
        self, machine: MachineState, routed: RoutedLayer, step: int, phase: Phase
    ) -> RoutedLayer:
        """Let the routing policy choose the experts of every token."""
        predicted_step, layer, predicted = self._predicted
        if (predicted_step, layer) != (step, routed.layer):
            predicted = None
        coming = routed.predicted.get("pred1_raw")
        self._predicted = (step, routed.layer + 1, coming)
        gate = Gate(
            step=step,
            layer=routed.layer,
            phase=phase,
            experts=routed.routing,
            weights=routed.weights,
            scores=routed.scores,
            predicted=predicted,
        )
        routing = machine.policies.routing.route(gate, machine)
        if routed.scores is not None:
            kept = gate_mass_kept(routed.scores, routed.routing, routing.experts)
            self.gate_mass.append(kept)
        elif routed.weights is not None:
            kept = weight_kept(routed.weights, routed.routing, routing.experts)
            self.gate_mass.append(kept)
        used = routing.experts[routing.experts < machine.experts]
        experts, tokens = np.unique(used, return_counts=True)
        return replace(
            routed,
            experts=experts.astype(np.int32),
            tokens=tokens.astype(np.int32),
            routing=routing.experts,
            weights=routing.weights,
        )

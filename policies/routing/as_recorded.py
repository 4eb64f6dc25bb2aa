"""The routing of the trace, or of the model's own gate, unchanged."""

from __future__ import annotations

from typing import ClassVar

from moesim.policies.base import Gate, MachineView, Routing, RoutingPolicy
from moesim.policies.kernels import RoutingKernels


class AsRecorded(RoutingPolicy):
    """Leave every token the experts that its gate chose.

    Source: every system that does not say otherwise.
    """

    alters: ClassVar[bool] = False

    def kernels(self) -> RoutingKernels:
        """The same in compiled runs."""
        return RoutingKernels()

    def route(
        self,
        gate: Gate,
        view: MachineView,
    ) -> Routing:
        """Return the gate's own choice."""
        del view
        return Routing(gate.experts, gate.weights)

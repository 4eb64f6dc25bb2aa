"""The routing of the trace, or of the model's own gate, unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.policies.base import RoutingPolicy

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Gate, MachineView


class AsRecorded(RoutingPolicy):
    """Leave every token the experts that its gate chose.

    Source: every system that does not say otherwise.
    """

    alters: ClassVar[bool] = False

    def route(self, gate: Gate, view: MachineView, routing: Ints) -> int:
        return 0

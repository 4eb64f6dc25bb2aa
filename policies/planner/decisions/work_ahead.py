"""Work ahead of the gate: experts of the next layer that the CPU starts on this layer's
hidden state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import RESIDENT, PolicyError, Precompute

if TYPE_CHECKING:
    from moesim.policies.planner.host_memory import HostMemory
    from moesim.policies.planner.machine_state import MachineState
    from moesim.policies.planner.plan import Plan


class WorkAhead:
    """Asks the assignment policy of a run for it, and remembers what was started."""

    def __init__(self) -> None:
        # Both by layer.
        self._started: dict[int, np.ndarray] = {}
        self._held: dict[int, np.ndarray] = {}

    def take(self, layer: int, experts: np.ndarray) -> np.ndarray | None:
        """Which active experts the CPU has started one layer ahead, bool [A]; None if
        it has started nothing here.
        """
        started = self._started.pop(layer, None)
        return None if started is None else np.isin(experts, started)

    def ask(self, machine: MachineState, plan: Plan) -> None:
        """Let the assignment name experts of the next layer.

        Those that are not in host memory are left to their own layer.
        """
        layer = plan.work.layer + 1
        named = machine.policies.assignment.precompute(plan.work, machine)
        if named is None or not len(named.experts):
            return
        experts = named.experts
        inside = experts.min() >= 0 and experts.max() < machine.experts
        if not inside or (np.diff(experts) <= 0).any():
            raise PolicyError(
                f"assignment policy {machine.assignment_name!r}: step {plan.work.step},"
                f" layer {layer}, ahead: expected ascending experts below"
                f" {machine.experts}, got {experts.tolist()}"
            )
        if machine.host is not None:
            # Staging is for reads that somebody waits for, not for guesses of a layer.
            memory = machine.host.memory
            present = memory.state[layer][experts] == RESIDENT
            present &= ~memory.staged[layer][experts]
            named = Precompute(experts[present], named.tokens[present], named.routing)
            # Needed until the product has ended and its layer step is over.
            machine.host.memory.hold(layer, named.experts)
            machine.host.memory.hold(layer, named.experts)
            self._held[layer] = named.experts
        self._started[layer] = named.experts
        plan.precompute = named
        seconds = machine.cpu_s(layer, named.tokens, named.experts)
        plan.precompute_s = seconds.tolist()

    def release(self, host: HostMemory, layer: int) -> None:
        """End the holds of a layer step that is over."""
        held = self._held.pop(layer, None)
        if held is not None:
            host.release(layer, held)

"""What a layer step consists of: which experts its tokens get, their states, costs and
arrivals, and which of them the CPU has computed ahead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.names import ABSENT, RESIDENT
from moesim.policies.planner import questions
from moesim.policies.planner.gate_mass import gate_mass_kept
from moesim.policies.planner.lookups import by_tokens, look_up
from moesim.policies.planner.records import GateOutputs, LayerWork, Precompute
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.planner.host_memory import HostMemory
    from moesim.policies.planner.machine_state import MachineState
    from moesim.policies.planner.plan import Plan
    from moesim.traces.format.batch import RoutedLayer


def look(
    machine: MachineState, routed: RoutedLayer, step: int, phase: Phase, batch: int
) -> LayerWork:
    """Look the active experts up: states, costs and expected arrivals."""
    layer = routed.layer
    experts = routed.experts
    tokens = routed.tokens
    active = len(experts)
    gpus = machine.serving[layer]
    now_s = machine.now_s
    host_s = machine.no_wait_s[:active]
    if machine.host is not None:
        host_s = machine.host.wait_s(layer, experts, now_s)

    costs = machine.costs
    cpu_table_s, gpu_table_s = costs.tables_s(layer)
    states = [np.empty(active, np.int8) for _ in gpus]
    arrive_s = np.empty((len(gpus), active))
    cpu_s = np.empty(active)
    gpu_s = np.empty((len(gpus), active))
    # Links are idle in most layer steps.
    link_s: np.ndarray | None = None
    for row, gpu in enumerate(gpus):
        memory = machine.gpu[gpu].memory
        link = machine.links[gpu]
        left_s = link.left_s(now_s)
        if left_s:
            if link_s is None:
                link_s = np.zeros(len(gpus))
            link_s[row] = left_s
        look_up(
            memory.state,
            memory.landing_s,
            layer,
            experts,
            now_s,
            left_s + link.first_copy_s[layer],
            states[row],
            arrive_s[row],
        )
        if machine.host is not None or machine.unequal:
            # A copy starts when link and expert are there, whichever is later.
            absent = states[row] == ABSENT
            copy_s = link.copy_s[layer, experts[absent]]
            arrive_s[row, absent] = np.maximum(left_s, host_s[absent]) + copy_s

    if by_tokens(cpu_table_s, gpu_table_s, tokens, cpu_s, gpu_s[0]):
        gpu_s[1:] = gpu_s[0]
    else:
        # So many tokens for the first time, or sizes that differ.
        cpu_s[:] = costs.cpu_s(layer, tokens, experts)
        gpu_s[:] = costs.gpu_s(layer, tokens, experts=experts)
    state = states[0] if len(gpus) == 1 else np.max(states, axis=0)
    return LayerWork(
        step,
        layer,
        phase,
        experts,
        tokens,
        state,
        cpu_s=cpu_s,
        host_s=host_s,
        gpu_s=gpu_s,
        arrive_s=arrive_s,
        routing=routed.routing,
        weights=routed.weights,
        scores=routed.scores,
        predicted=routed.predicted,
        batch=batch,
        link_s=link_s,
    )


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
        gate = GateOutputs(
            step=step,
            layer=routed.layer,
            phase=phase,
            experts=routed.routing,
            weights=routed.weights,
            scores=routed.scores,
            predicted=predicted,
        )
        asked, routing = questions.route(machine, gate)
        if routed.scores is not None or routed.weights is not None:
            used = np.ascontiguousarray(routing.experts, np.uint16)
            self.gate_mass.append(gate_mass_kept(asked, used.data))
        used = routing.experts[routing.experts < machine.experts]
        experts, tokens = np.unique(used, return_counts=True)
        return replace(
            routed,
            experts=experts.astype(np.int32),
            tokens=tokens.astype(np.int32),
            routing=routing.experts,
            weights=routing.weights,
        )


def check_ahead(machine: MachineState, work: LayerWork, named: Precompute) -> None:
    """Refuse work ahead of a gate that cannot be.

    Raises:
        PolicyError: naming the policy and the layer step that asked for it.
    """
    experts = named.experts
    inside = experts.min() >= 0 and experts.max() < machine.experts
    if not inside or (np.diff(experts) <= 0).any() or named.tokens.min() < 1:
        raise PolicyError(
            f"assignment policy {machine.assignment_name!r}: step {work.step}, layer"
            f" {work.layer + 1}, ahead: expected ascending experts below"
            f" {machine.experts}, with tokens, got {experts.tolist()}"
        )


def _kept_in_host_memory(
    machine: MachineState, layer: int, experts: np.ndarray
) -> np.ndarray:
    """Whether the CPU can compute each without a place in staging: that is for reads
    that a layer step waits for. Bool [B].
    """
    if machine.host is None:
        return np.ones(len(experts), np.bool_)
    memory = machine.host.memory
    is_there: np.ndarray = memory.state[layer][experts] == RESIDENT
    return is_there & ~memory.staged[layer][experts]


def deferrable(machine: MachineState, work: LayerWork) -> np.ndarray:
    """Whose results may join in the next layer step, bool [A]."""
    if work.phase != Phase.DECODE or work.layer + 1 == machine.layers:
        return np.zeros(len(work.experts), np.bool_)
    may = _kept_in_host_memory(machine, work.layer, work.experts)
    if work.precomputed is not None:
        may &= ~work.precomputed
    return may


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
        named = questions.precompute(machine, plan.work)
        if named is None or not len(named.experts):
            return
        check_ahead(machine, plan.work, named)
        experts = named.experts
        if machine.host is not None:
            present = _kept_in_host_memory(machine, layer, experts)
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

"""What a layer step asks for: states, costs and arrivals of its active experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import ABSENT, LayerWork
from moesim.policies.planner.residency_kernels import look_up_work

if TYPE_CHECKING:
    from moesim.policies.planner.machine_state import MachineState
    from moesim.traces.format.batch import RoutedLayer
    from moesim.traces.format.schema import Phase


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
    tabulated = True
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
        tabulated = look_up_work(
            memory.state,
            memory.landing_s,
            layer,
            experts,
            now_s,
            left_s + link.first_copy_s[layer],
            states[row],
            arrive_s[row],
            cpu_table_s,
            gpu_table_s,
            tokens,
            cpu_s,
            gpu_s[row],
        )
        if machine.host is not None or machine.unequal:
            # A copy starts when link and expert are there, whichever is later.
            absent = states[row] == ABSENT
            copy_s = link.copy_s[layer, experts[absent]]
            arrive_s[row, absent] = np.maximum(left_s, host_s[absent]) + copy_s

    if not tabulated:
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

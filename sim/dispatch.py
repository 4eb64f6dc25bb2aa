"""What the lanes compute in one layer step: now, when the weights land, after the GPUs,
or ahead of the gate.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from moesim.policies.base import CPU, RESIDENT
from moesim.policies.planner.plan import FETCH, READ
from moesim.sim.contention import Operation
from moesim.traces.timeline.spans import COMPUTE

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.hwprofiles.costs import Costs
    from moesim.policies.base import Ahead
    from moesim.policies.planner.plan import Plan
    from moesim.policies.planner.planner import Planner
    from moesim.sim.machine import Machine
    from moesim.sim.transfers import Transfers


class Computes:
    """Dispatches the experts of a plan to their lanes and counts them home.

    `pending` is how many of the current layer step have not ended; the last one calls
    `joined`.
    """

    def __init__(
        self,
        machine: Machine,
        transfers: Transfers,
        planner: Planner,
        costs: Costs,
        lanes: list[int],
        joined: Callable[[Operation | None], object],
    ) -> None:
        self._machine = machine
        self._joined = joined
        self._transfers = transfers
        self._lanes = lanes
        self._experts = planner.shape.experts
        self._dispatch_s = costs.dispatch_s
        tiered = planner.host is not None
        self._first_op_s = cache(
            lambda active, copies: costs.first_op_s(active, copies, tiered=tiered)
        )
        self._after_read = costs.after_read("cpu") if planner.host else 1.0
        memories = [
            planner.host.memory if planner.host else None,
            *(tier.memory for tier in planner.gpu),
        ]
        # By lane code, int8 [L, E].
        self._state = [None if memory is None else memory.state for memory in memories]
        self._first_s = [costs.cpu_first_s] + [costs.gpu_first_s] * planner.gpus
        self.pending = 0
        self._fetched = 0  # fetched experts that a serial plan's CPU still waits for
        self._held: list[Operation] = []
        self._early: dict[
            tuple[int, int], Operation
        ] = {}  # (layer, expert) -> computed ahead, not yet ended

    def dispatch(self, plan: Plan) -> bool:
        """Queue what can be computed now; the rest follows its landing.

        Returns:
            Whether the CPU has a part in this layer step.
        """
        work = plan.work
        self.pending = len(work.experts)
        cpu_used = False
        if work.started is not None:
            cpu_used = bool(work.started.any())
            for expert in work.experts[work.started].tolist():
                self._await_early(work.layer, expert)
        cpu_used |= self._begin(plan)
        if self._held and not self._fetched:
            self._release_held()
        if plan.ahead is not None:
            self._begin_early(plan, plan.ahead)
        if not self.pending:
            self._joined(None)
        return cpu_used

    def _begin(self, plan: Plan) -> bool:
        """Queue every expert that has not begun already, in launch order; whether one
        of them is the CPU's.
        """
        work = plan.work
        lanes = self._lanes
        dispatch_s = self._dispatch_s
        computed = self._computed
        step = work.step
        layer = work.layer
        experts = work.experts.tolist()
        codes = plan.lanes.tolist()
        gpu_s = work.gpu_s.tolist()
        lane_s = [
            work.cpu_s.tolist(),
            *(gpu_s if len(gpu_s) > 1 else gpu_s * (len(lanes) - 1)),
        ]
        if self._after_read != 1.0:
            read = {
                expert
                for copies in plan.copies
                if copies.kind == READ
                for expert in copies.experts
            }
            lane_s[CPU] = [
                s * self._after_read if e in read else s
                for e, s in zip(experts, lane_s[CPU], strict=True)
            ]
        staged = _staged(plan) if plan.copies else ()
        started = None if work.started is None else work.started.tolist()
        first_op_s = self._first_op_s(len(experts), plan.copied)
        unused = [True] * len(lanes)
        for i in plan.order:
            if started is not None and started[i]:
                continue
            code = codes[i]
            expert = experts[i]
            work_s = dispatch_s + lane_s[code][i]
            if unused[code]:
                unused[code] = False
                work_s += first_op_s + self._first_s[code]
            compute = Operation(
                lanes[code], COMPUTE, step, layer, expert, work_s, 0, computed
            )
            if expert in staged:
                compute.frees = (
                    self._machine.staging[code - 1]
                    if code
                    else self._machine.host_staging
                )
            if code == CPU and plan.serial:
                self._held.append(compute)
            else:
                self._start_when_present(code, compute, serial=plan.serial)
        return not unused[CPU]

    def _start_when_present(
        self, code: int, compute: Operation, *, serial: bool = False
    ) -> None:
        """Submit an operation now, or when its weights have landed where it runs."""
        layer = compute.layer
        expert = compute.expert
        state = self._state[code]
        if state is None or state[layer, expert] == RESIDENT:
            self._machine.submit(compute)
        elif code == CPU:
            self._transfers.when_read(layer * self._experts + expert, compute)
        else:
            if serial:
                self._fetched += 1
                compute.on_end = self._fetched_computed
            self._transfers.when_landed(
                code - 1, layer * self._experts + expert, compute
            )

    def _begin_early(self, plan: Plan, ahead: Ahead) -> None:
        """Queue the next layer's experts that the CPU computes ahead, after this
        layer's own.
        """
        layer = plan.work.layer + 1
        for expert, compute_s in zip(ahead.experts.tolist(), plan.ahead_s, strict=True):
            work_s = compute_s + self._dispatch_s
            compute = Operation(
                self._lanes[CPU],
                COMPUTE,
                plan.work.step,
                layer,
                expert,
                work_s,
                0,
                self._early_computed,
            )
            self._early[layer, expert] = compute
            self._machine.submit(compute)

    def _await_early(self, layer: int, expert: int) -> None:
        """Count an expert computed ahead: done already, or when its product ends."""
        compute = self._early.pop((layer, expert), None)
        if compute is None:
            self.pending -= 1
        else:
            compute.on_end = self._computed

    def _early_computed(self, operation: Operation) -> None:
        key = operation.layer, operation.expert
        # A wrong guess of an earlier step may end after its successor began.
        if self._early.get(key) is operation:
            del self._early[key]

    def _computed(self, operation: Operation) -> None:
        """Count a finished expert; the last one ends the lanes' work on this layer
        step.
        """
        self.pending -= 1
        if not self.pending:
            self._joined(operation)

    def _fetched_computed(self, operation: Operation) -> None:
        self._fetched -= 1
        if not self._fetched:
            self._release_held()
        self._computed(operation)

    def _release_held(self) -> None:
        """Let the CPU of a serial plan begin."""
        held = self._held
        self._held = []
        for compute in held:
            self._start_when_present(CPU, compute)


def _staged(plan: Plan) -> set[int]:
    """Experts that this layer step brings into a staging area."""
    copies = [one for one in plan.copies if one.kind in {FETCH, READ}]
    return {
        expert
        for one in copies
        for expert, yes in zip(one.experts, one.staged, strict=True)
        if yes
    }

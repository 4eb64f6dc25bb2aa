"""What the lanes compute in one layer step: now, when the weights land, after the GPUs, or ahead of the gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.base import CPU, RESIDENT
from policies.plan import FETCH, READ
from sim.contention import Operation
from traces.timeline import COMPUTE

if TYPE_CHECKING:
    from simpy.events import Event

    from hwprofiles.costs import Costs
    from policies.plan import Plan
    from policies.planner import Planner
    from sim.machine import Machine
    from sim.transfers import Transfers


class Computes:
    """Dispatches the experts of a plan to their lanes and counts them home.

    `pending` is how many of the current layer step have not ended.
    """

    def __init__(
        self, machine: Machine, transfers: Transfers, planner: Planner, costs: Costs, lanes: list[int]
    ) -> None:
        self._machine = machine
        self._transfers = transfers
        self._planner = planner
        self._lanes = lanes
        self._experts = planner.shape.experts
        self._dispatch_s = costs.dispatch_s
        self._costs = costs
        self._after_read = costs.after_read("cpu") if planner.host else 1.0
        self._first_s = [costs.cpu_first_s] + [costs.gpu_first_s] * planner.gpus
        self.pending = 0
        self._done: Event | None = None
        self._fetched = 0  # fetched experts that a serial plan's CPU still waits for
        self._held: list[Operation] = []
        self._early: dict[tuple[int, int], Operation] = {}  # (layer, expert) -> computed ahead, not yet ended

    def dispatch(self, plan: Plan, done: Event) -> bool:
        """Queue what can be computed now; the rest follows its landing. `done` succeeds with the last expert.

        Returns:
            Whether the CPU has a part in this layer step.
        """
        work = plan.work
        self._done = done
        self.pending = len(work.experts)
        cpu_used = False
        if work.started is not None:
            cpu_used = bool(work.started.any())
            for expert in work.experts[work.started].tolist():
                self._await_early(work.layer, expert)
        for code, compute in self._operations(plan):
            cpu_used = cpu_used or code == CPU
            if code == CPU and plan.serial:
                self._held.append(compute)
            else:
                self._start_when_present(code, compute, serial=plan.serial)
        if not self._fetched:
            self._release_held()
        self._begin_early(plan)
        if not self.pending:
            done.succeed()
        return cpu_used

    def _operations(self, plan: Plan) -> list[tuple[int, Operation]]:
        """Lane code and operation of every expert that has not begun already, in launch order."""
        work = plan.work
        staged = {
            e for c in plan.copies if c.kind in {FETCH, READ} for e, yes in zip(c.experts, c.staged, strict=True) if yes
        }
        experts, codes, cpu_s, gpu_s = (
            work.experts.tolist(),
            plan.lanes.tolist(),
            work.cpu_s.tolist(),
            work.gpu_s.tolist(),
        )
        if self._after_read != 1.0:
            read = {expert for copies in plan.copies if copies.kind == READ for expert in copies.experts}
            cpu_s = [s * self._after_read if e in read else s for e, s in zip(experts, cpu_s, strict=True)]
        started = None if work.started is None else work.started.tolist()
        first_op_s = self._costs.first_op_s(len(experts), plan.copied, tiered=self._planner.host is not None)
        unused = [True] * len(self._lanes)
        found = []
        for i in plan.order:
            if started is not None and started[i]:
                continue
            code = codes[i]
            work_s = self._dispatch_s + (cpu_s[i] if code == CPU else gpu_s[code - 1 if len(gpu_s) > 1 else 0][i])
            if unused[code]:
                unused[code] = False
                work_s += first_op_s + self._first_s[code]
            compute = Operation(
                self._lanes[code], COMPUTE, work.step, work.layer, experts[i], work_s, 0, self._computed
            )
            if experts[i] in staged:
                compute.frees = self._machine.staging[code - 1] if code else self._machine.host_staging
            found.append((code, compute))
        return found

    def _start_when_present(self, code: int, compute: Operation, *, serial: bool = False) -> None:
        """Submit an operation now, or when its weights have landed where it runs."""
        layer, expert = compute.layer, compute.expert
        if code == CPU:
            host = self._planner.host
            if host is None or host.memory.state[layer, expert] == RESIDENT:
                self._machine.submit(compute)
            else:
                self._transfers.when_read(layer * self._experts + expert, compute)
        elif self._planner.gpu[code - 1].memory.state[layer, expert] == RESIDENT:
            self._machine.submit(compute)
        else:
            if serial:
                self._fetched += 1
                compute.on_end = self._fetched_computed
            self._transfers.when_landed(code - 1, layer * self._experts + expert, compute)

    def _begin_early(self, plan: Plan) -> None:
        """Queue the next layer's experts that the CPU computes ahead, after this layer's own."""
        if plan.ahead is None:
            return
        layer = plan.work.layer + 1
        for expert, compute_s in zip(plan.ahead.experts.tolist(), plan.ahead_s, strict=True):
            work_s = compute_s + self._dispatch_s
            compute = Operation(
                self._lanes[CPU], COMPUTE, plan.work.step, layer, expert, work_s, 0, self._early_computed
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
        if self._early.get(key) is operation:  # a wrong guess of an earlier step may end after its successor began
            del self._early[key]

    def _computed(self, _: Operation) -> None:
        """Count a finished expert; the last one ends the lanes' work on this layer step."""
        self.pending -= 1
        if not self.pending:
            assert self._done is not None
            self._done.succeed()

    def _fetched_computed(self, operation: Operation) -> None:
        self._fetched -= 1
        if not self._fetched:
            self._release_held()
        self._computed(operation)

    def _release_held(self) -> None:
        """Let the CPU of a serial plan begin."""
        held, self._held = self._held, []
        for compute in held:
            self._start_when_present(CPU, compute)

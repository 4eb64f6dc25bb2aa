"""Copies in virtual time: SSD to host memory to GPU, as a chain, demand before
prefetch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.planner.plan import FETCH, READ, REPLACE
from moesim.sim.contention import Operation
from moesim.sim.machine import AHEAD, DEMAND, REPLACING
from moesim.traces.timeline import spans as kinds

if TYPE_CHECKING:
    import numpy as np
    from moesim.hwprofiles.costs import Costs
    from moesim.policies.planner.plan import Copies
    from moesim.policies.planner.planner import Planner
    from moesim.sim.machine import Machine


class Transfers:
    """Carries out the planner's copies and reports their landings to it."""

    def __init__(self, machine: Machine, planner: Planner, costs: Costs) -> None:
        self._machine = machine
        self._planner = planner
        shape = planner.shape
        self._experts = shape.experts
        self._bytes = shape.expert_bytes
        self._dispatch_s = costs.dispatch_s
        self._copy_s = [
            [costs.copy_s(layer, g) for layer in range(shape.layers)]
            for g in range(planner.gpus)
        ]
        self._read_s = (
            [costs.read_s(layer) for layer in range(shape.layers)]
            if planner.host
            else []
        )
        self._link = [machine.lanes.index(f"h2d{gpu}") for gpu in range(planner.gpus)]
        self._ssd = machine.lanes.index("ssd") if "ssd" in machine.lanes else -1
        self._first_read_s = costs.ssd_first_s
        self._after_read = costs.after_read("h2d") if planner.host else 1.0
        self._read_at = -1, -1  # step and layer of the last demanded read
        self._landing: dict[
            tuple[int, int], Operation
        ] = {}  # (gpu, key) -> GPU compute that waits
        self._reading: dict[int, list[Then]] = {}  # key -> what waits for host memory
        self._waiting: dict[
            int, dict[tuple[int, int, int], Operation]
        ] = {}  # layer -> prefetches not started

    def enqueue(self, copies: Copies, step: int) -> None:
        """Queue copies in their order."""
        kind = copies.kind
        gpu = copies.gpu
        layer = copies.layer
        nbytes = self._bytes[copies.layer]
        priority = (
            DEMAND if kind in {FETCH, READ} else REPLACING if kind == REPLACE else AHEAD
        )
        copied = zip(
            copies.experts, copies.staged, copies.read, copies.host_staged, strict=True
        )
        if kind == READ:
            for expert, _, _, host_staged in copied:
                self._read(step, layer, expert, priority, staged=host_staged)
            return
        lane = self._link[gpu]
        copy_s = self._copy_s[gpu][layer]
        for expert, staged, read, host_staged in copied:
            key = layer * self._experts + expert
            work_s = copy_s * (self._after_read if read else 1.0) + self._dispatch_s
            link = Operation(
                lane, kind, step, layer, expert, work_s, nbytes, self._landed
            )
            link.staged = kind == FETCH and staged
            link.frees = self._machine.host_staging if host_staged else None
            first = link
            if read:
                first = self._read(step, layer, expert, priority, staged=host_staged)
                self._reading[key].append(Then(link, priority))
            elif key in self._reading:
                self._reading[key].append(Then(link, priority))
            else:
                self._machine.submit(link, priority)
            if priority == AHEAD:
                self._waiting.setdefault(layer, {})[gpu, layer, expert] = first

    def when_landed(self, gpu: int, key: int, compute: Operation) -> None:
        """Submit `compute` when a copy in flight lands on a GPU."""
        self._landing[gpu, key] = compute

    def when_read(self, key: int, compute: Operation) -> None:
        """Submit `compute` when an expert on its way from the SSD is in host memory."""
        self._reading[key].append(Then(compute))

    def begin_layer(self, layer: int, active: np.ndarray) -> None:
        """Take back the prefetches for this layer whose chain has not started: the
        planner drops them or demands them.

        Where the queue is sorted anew at every layer, those for other layers are taken
        back and dropped as well. `active` int32 [A]: the experts that the gate chose.
        """
        if not self._waiting:
            return
        machine = self._machine
        unstarted: dict[tuple[int, int, int], Operation] = {}
        for own in list(self._waiting) if self._planner.requeues else [layer]:
            waiting = self._waiting.get(own, {})
            taken = {
                key: op
                for key, op in waiting.items()
                if self._idle(op) and machine.withdraw(op, AHEAD)
            }
            self._waiting[own] = {
                key: op for key, op in waiting.items() if key not in taken
            }
            unstarted |= taken
        self._waiting.pop(layer, None)
        if not unstarted:
            return
        for key in self._planner.late(list(unstarted), layer, active.tolist()):
            operation = unstarted.pop(key)
            if operation.kind == kinds.READ:
                del self._reading[self._key(operation)]
        for operation in unstarted.values():
            if operation.kind == kinds.READ:
                for then in self._reading[self._key(operation)]:
                    then.priority = DEMAND
            machine.submit(operation, DEMAND)

    def _idle(self, operation: Operation) -> bool:
        """Whether a prefetch's first operation has not started and serves nothing
        else.
        """
        if operation.start_s >= 0.0:
            return False
        return (
            operation.kind != kinds.READ
            or len(self._reading[self._key(operation)]) == 1
        )

    def _key(self, operation: Operation) -> int:
        return operation.layer * self._experts + operation.expert

    def _read(
        self, step: int, layer: int, expert: int, priority: int, *, staged: bool
    ) -> Operation:
        work_s = self._read_s[layer] + self._dispatch_s
        if priority == DEMAND and self._read_at != (step, layer):
            self._read_at = step, layer
            work_s += self._first_read_s
        operation = Operation(
            self._ssd,
            kinds.READ,
            step,
            layer,
            expert,
            work_s,
            self._bytes[layer],
            self._read_done,
        )
        operation.staged = staged
        self._reading[layer * self._experts + expert] = []
        self._machine.submit(operation, priority)
        return operation

    def _read_done(self, operation: Operation) -> None:
        self._planner.read_done(operation.layer, operation.expert)
        for then in self._reading.pop(self._key(operation)):
            self._machine.submit(then.operation, then.priority)

    def _landed(self, operation: Operation) -> None:
        gpu = self._link.index(operation.lane)
        self._planner.landed(gpu, operation.layer, operation.expert)
        compute = self._landing.pop((gpu, self._key(operation)), None)
        if compute is not None:
            self._machine.submit(compute)


class Then:
    """What follows once an expert is in host memory."""

    __slots__ = ("operation", "priority")

    def __init__(self, operation: Operation, priority: int = DEMAND) -> None:
        self.operation = operation
        self.priority = priority

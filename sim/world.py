"""The virtual world: what operations cost, and the lanes that spend it.

Everything that follows from a plan is the engine's (`moesim.engine`). Here an operation
gets its duration from the machine's costs.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from moesim.hwprofiles import lanes
from moesim.hwprofiles.costs import seconds_by_expert
from moesim.policies.names import CPU
from moesim.policies.planner.plan import FETCH, READ, REPLACE
from moesim.sim.clock import Operation
from moesim.traces.timeline.operations import LAUNCH, NOTE, REQUEST, RETURN
from moesim.traces.timeline.spans import ACTIVATION, COMPUTE, DENSE, JOIN, PLAN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from moesim.hwprofiles.costs import Costs
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.planner.plan import Copies, Plan
    from moesim.policies.planner.planner import Planner
    from moesim.sim.clock import Clock
    from moesim.sim.machine import Machine, Measurements
    from moesim.traces.timeline.spans import Timeline


TURN: Final = "the process's next turn"
"""What the replaying process waits for, always."""


class VirtualWorld:
    """Makes operations with their durations and lets a machine spend them.

    Attributes:
        lanes: names of the lanes, by index.
        has_read: whether the last layer step read from the SSD.
        dense_s: seconds of a layer's dense part in the forward pass under way.
        parts: whether control's parts between its spans are operations too.

    Args:
        clock: virtual time.
        machine: spends the operations.
        profile: lanes and memories.
        costs: how long operations take.
        planner: decides.
        timeline: takes accesses.
        measured: of a real run: everything that control does between its spans is an
            operation then. In predictions planning, first operation and join have it.
    """

    def __init__(
        self,
        clock: Clock,
        machine: Machine,
        profile: HardwareProfile,
        costs: Costs,
        planner: Planner,
        timeline: Timeline,
        *,
        measured: Measurements | None = None,
    ) -> None:
        self.lanes = machine.lanes
        self.submit = machine.submit
        self.withdraw = machine.withdraw
        self.offer = machine.offer
        self.admission = machine.admission
        self.has_read = False
        self.dense_s = 0.0
        self._clock = clock
        self._machine = machine
        self._planner = planner
        self._timeline = timeline
        self.parts = measured is not None
        self._measured = measured
        self._holds_control = False
        self._place = (-1, -1)  # step and layer under way
        self._nothing_held = nullcontext()

        # Lanes by what runs there; lane codes of assignments are 0 for the CPU.
        gpus = range(profile.gpus)
        index = {lane: number for number, lane in enumerate(self.lanes)}
        self._control = index[lanes.CONTROL.lane()]
        self._ssd = index[lanes.SSD.lane()]
        self._links = [index[lanes.H2D.lane(gpu)] for gpu in gpus]
        self._back_links = [index[lanes.D2H.lane(gpu)] for gpu in gpus]
        self._compute_lanes = [
            index[lanes.CPU.lane()],
            *(index[lanes.GPU.lane(gpu)] for gpu in gpus),
        ]

        # One thread may serve the first GPU's lane and control: then the model's.
        self._inline = machine.shares_worker(self._control, self._compute_lanes[1])
        if self._inline:
            machine.take(self._control, _nothing)

        # Durations that depend on sizes or counts only.
        shape = planner.shape
        limited = planner.host is not None
        # By layer and expert.
        self._bytes = shape.sizes_by_expert()
        self._dispatch_s = costs.dispatch_s
        self._first_s = [costs.cpu_first_s] + [costs.gpu_first_s] * planner.gpus
        self._copy_s = [
            seconds_by_expert(shape, partial(costs.copy_s, gpu=gpu)).tolist()
            for gpu in gpus
        ]
        self._back_s = []
        if planner.policies.writes_back:
            self._back_s = [
                seconds_by_expert(shape, partial(costs.writeback_s, gpu=gpu)).tolist()
                for gpu in gpus
            ]
        self._read_s = []
        if limited:
            self._read_s = seconds_by_expert(shape, costs.read_s).tolist()
        self._first_read_s = costs.ssd_first_s
        self._first_op_s = cache(
            lambda active, copies: costs.first_op_s(active, copies, tiered=limited)
        )
        self._join_s = cache(
            lambda active, copies: costs.join_s(active, copies, tiered=limited)
        )
        self._split_s = costs.split_s
        self._gpu_used = False
        self._always_split = planner.always_split.tolist()
        self._activation_s = cache(costs.activation_s)
        # Where all memory is shared, results need no way back.
        self._moves_activations = not profile.shares_memory

        # What comes straight from the SSD is not in the processor's caches.
        self._copy_after_read = costs.after_read("h2d") if limited else 1.0
        self._compute_after_read = costs.after_read("cpu") if limited else 1.0
        self._notes_reads = limited and costs.after_read("dense") != 1.0
        self._last_read_at = (-1, -1)  # step and layer of the last demanded read

    # -- operations -------------------------------------------------------------------

    def read(self, step: int, layer: int, expert: int, *, demanded: bool) -> Operation:
        """Make the read of an expert.

        The first one that a layer step demands takes longer.
        """
        work_s = self._read_s[layer][expert] + self._dispatch_s
        if demanded and self._last_read_at != (step, layer):
            self._last_read_at = (step, layer)
            work_s += self._first_read_s
        operation = Operation(self._ssd, READ, step, layer, expert, work_s)
        operation.nbytes = self._bytes[layer][expert]
        return operation

    def copy(self, copies: Copies, position: int, step: int) -> Operation:
        """Make the copy of an expert."""
        gpu = copies.gpu
        layer = copies.layer
        expert = copies.experts[position]
        copy_s = self._copy_s[gpu][layer][expert]
        if copies.read[position]:
            copy_s *= self._copy_after_read
        lane = self._links[gpu]
        work_s = copy_s + self._dispatch_s
        operation = Operation(lane, copies.kind, step, layer, expert, work_s)
        operation.nbytes = self._bytes[layer][expert]
        return operation

    def computes(self, plan: Plan) -> list[Operation]:
        """Make the products of a layer step, in launch order.

        The first product of a lane takes longer: its worker has to be woken.
        """
        work = plan.work
        step = work.step
        layer = work.layer
        lanes = self._compute_lanes
        experts = work.experts.tolist()
        codes = plan.lanes.tolist()
        lane_s = self._durations_s(plan, experts)
        first_op_s = self._first_op_s(len(experts), plan.copied)
        unused = [True] * len(lanes)
        skipped = None if work.precomputed is None else work.precomputed.tolist()
        products = []
        for i in plan.order:
            if skipped is not None and skipped[i]:
                continue
            code = codes[i]
            expert = experts[i]
            work_s = self._dispatch_s + lane_s[code][i]
            if unused[code]:
                unused[code] = False
                work_s += first_op_s + self._first_s[code]
            product = Operation(lanes[code], COMPUTE, step, layer, expert, work_s)
            products.append(product)
        self._gpu_used = not all(unused[1:])
        return products

    def _durations_s(self, plan: Plan, experts: list[int]) -> list[list[float]]:
        """Seconds of every active expert on every compute lane."""
        work = plan.work
        cpu_s = work.cpu_s.tolist()
        gpu_s = work.gpu_s.tolist()
        if self._compute_after_read != 1.0:
            read = {
                expert
                for copies in plan.copies
                if copies.kind == READ
                for expert in copies.experts
            }
            cpu_s = [
                seconds * self._compute_after_read if expert in read else seconds
                for expert, seconds in zip(experts, cpu_s, strict=True)
            ]
        # A layer that one GPU serves has one row, whichever GPU that is.
        several = len(gpu_s) > 1
        return [cpu_s, *(gpu_s if several else gpu_s * (len(self._compute_lanes) - 1))]

    def precomputes(self, plan: Plan) -> Iterator[Operation]:
        """Make the products of the next layer's experts that the CPU starts now."""
        precompute = plan.precompute
        assert precompute is not None
        step = plan.work.step
        layer = plan.work.layer + 1
        lane = self._compute_lanes[CPU]
        for expert, seconds in zip(
            precompute.experts.tolist(), plan.precompute_s, strict=True
        ):
            work_s = seconds + self._dispatch_s
            yield Operation(lane, COMPUTE, step, layer, expert, work_s)

    def predictions(self, plan: Plan) -> tuple[Operation, ...]:
        """Make the evaluation of coming layers' dense parts: as long as this step's."""
        work = plan.work
        lane = self._compute_lanes[1 + self._planner.home(work.layer)]
        work_s = plan.dense_parts * self.dense_s + self._dispatch_s
        return (Operation(lane, DENSE, work.step, work.layer, -1, work_s),)

    # -- what the engine reports ------------------------------------------------------

    def placed(self, operation: Operation, gpu: int) -> None:
        """Nothing: places exist in the planner's books only."""

    def write_back(self, operation: Operation, layer: int, expert: int) -> None:
        """Keep the way back busy; nobody waits for the expert itself."""
        gpu = self._links.index(operation.lane)
        work_s = self._back_s[gpu][layer][expert] + self._dispatch_s
        lane = self._back_links[gpu]
        copy = Operation(lane, REPLACE, operation.step, layer, expert, work_s)
        copy.nbytes = self._bytes[layer][expert]
        self.submit(copy)

    def computed(self, _: Operation | None) -> None:
        """Give the replaying process its turn once control is free: it joins before it
        serves its lanes again.
        """
        self._machine.take(self._control, self._clock.wake)

    # -- one layer step ---------------------------------------------------------------

    def now_s(self) -> float:
        """Virtual seconds since the run began."""
        return self._clock.now_s

    def exclusive(self) -> AbstractContextManager[None]:
        """Nothing happens in virtual time while Python runs."""
        return self._nothing_held

    def planned(self, plan: Plan) -> tuple[str]:
        """Note every access, and let control plan as long as planning takes."""
        work = plan.work
        self._timeline.access(
            work.step, work.layer, work.experts, work.tokens, plan.lanes, work.state
        )
        return (self._controls(PLAN, plan.planning_s),)

    def launching(self, plan: Plan) -> None:
        """Note whether anything is read."""
        self.has_read = self._notes_reads and any(
            copies.kind == READ or (copies.kind == FETCH and any(copies.read))
            for copies in plan.copies
        )

    def all_computed(self) -> str:
        """The process's turn after the last product of the layer step.

        Control serves its lanes meanwhile.
        """
        self._serves_after(LAUNCH)
        return TURN

    def joined(self, plan: Plan, *, cpu_used: bool) -> Iterator[str]:
        """Bring the CPU's results to the GPU, then join all of them."""
        work = plan.work
        step = work.step
        layer = work.layer
        if cpu_used and self._moves_activations:
            lane = self._back_links[self._planner.home(layer)]
            seconds = self._activation_s(len(work.routing))
            yield self.alone(lane, ACTIVATION, step, layer, seconds)
        join_s = self._join_s(len(work.experts), plan.copied)
        shared = cpu_used and self._gpu_used
        if shared or self._always_split[layer]:
            join_s += self._split_s
            # A graph that is built once wakes the CPU even where it has nothing to do.
            if not cpu_used:
                join_s += self._first_s[CPU]
        yield self._controls(JOIN, join_s)

    def end_layer(self) -> None:
        """Let control serve its lanes; the process goes on by itself."""
        if not self._inline:
            self._serves_after(RETURN)

    def asked(self, step: int, layer: int) -> tuple[str, ...]:
        """The gate has spoken: wait for control, which plans."""
        self._place = step, layer
        machine = self._machine
        if self.parts:
            request = partial(machine.start, self._part(REQUEST, self._kept))
            if self._inline or self._holds_control:
                self._holds_control = False
                request()
            else:
                machine.take(self._control, request)
            return (TURN,)
        if self._inline or machine.take_if_free(self._control):
            return ()
        machine.take(self._control, self._clock.wake)
        return (TURN,)

    def noted(self, step: int) -> None:
        """A forward pass has ended: control writes it down; nobody waits for that."""
        if self._measured is None or self._inline:
            return
        self._place = step, -1
        note = self._part(NOTE, None)
        if not self._holds_control:
            self._machine.take(self._control, partial(self._machine.start, note))
        elif self._measured.has(note):
            self._holds_control = False
            self._machine.start(note)

    def alone(self, lane: int, kind: int, step: int, layer: int, work_s: float) -> str:
        """Start one operation and return the process's turn after it."""
        operation = Operation(lane, kind, step, layer, -1, work_s)
        if self._inline and self._machine.shares_worker(lane, self._control):
            # The thread is the model's until it asks for experts.
            operation.on_end = self._kept
            self._machine.start(operation)
        else:
            operation.on_end = self._clock.wake
            self.submit(operation)
        return TURN

    # -- control ----------------------------------------------------------------------

    def _controls(self, kind: int, work_s: float) -> str:
        """Let control, which was taken, work; return the process's turn after it."""
        self._machine.start(self._part(kind, self._kept, work_s))
        return TURN

    def _serves_after(self, kind: int) -> None:
        """Let control serve its lanes, in a real run after some microseconds."""
        if self._measured is None:
            self._machine.give(self._control)
            return
        part = self._part(kind, None)
        if kind == RETURN and not self._measured.has(part):
            # Control was asked again before it served anything.
            self._holds_control = True
        else:
            self._machine.start(part)

    def _part(
        self,
        kind: int,
        on_end: Callable[[Operation], object] | None,
        work_s: float = 0.0,
    ) -> Operation:
        step, layer = self._place
        part = Operation(self._control, kind, step, layer, -1, work_s)
        part.on_end = on_end
        return part

    def _kept(self, operation: Operation) -> None:
        """Keep the operation's worker, and give the replaying process its turn."""
        self._machine.keep(operation)
        self._clock.wake()


def _nothing() -> None:
    """Nothing follows."""

"""The real world: operations that really read, copy and compute, on real workers.

Everything that follows from a plan is the engine's (`moesim.engine`). One thing exists
only here: products ahead of the gate are made for certain tokens, and a token that
needs such an expert without having been predicted for it is served in the expert's own
layer, on its own input.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import torch

from moesim.engine.lanes import Admission
from moesim.hwprofiles import lanes as kinds
from moesim.policies.names import CPU, RESIDENT
from moesim.policies.planner.plan import READ, REPLACE
from moesim.runtime.executor.memories import PrecomputedRows
from moesim.runtime.executor.operations import (
    Compute,
    Copy,
    Precompute,
    Prediction,
    Read,
    WriteBack,
)
from moesim.traces.timeline.operations import LAUNCH, NOTE, REQUEST, RETURN, Part
from moesim.traces.timeline.spans import (
    ACTIVATION,
    DENSE,
    JOIN,
    PLAN,
    pack_span,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.policies.planner.plan import Copies, Plan
    from moesim.policies.planner.planner import Planner
    from moesim.runtime.executor.lanes import Lanes, Operation, WakingLock
    from moesim.runtime.executor.memories import LayerJob
    from moesim.runtime.executor.operations import Memories
    from moesim.traces.timeline.spans import Timeline

NO_WAITS = ()


def part_of(operation: Operation) -> Part:
    """When an operation kept its worker."""
    part = Part(
        lane=operation.lane,
        kind=operation.kind,
        step=operation.step,
        layer=operation.layer,
        expert=operation.expert,
        picked_s=operation.picked_s,
        start_s=operation.start_s,
        end_s=operation.end_s,
        ended_s=operation.ended_s,
    )
    if operation.counters is None:
        return part
    return part._replace(**operation.counters._asdict())


class RealWorld:
    """Makes real operations and hands them to workers.

    Between two layer steps products ahead of the gate run where the CPU lane has a
    thread that is free: its own, or the control thread, which waits. Where that thread
    also runs the model (one core for everything), they begin with the next layer step.

    Attributes:
        lanes: names of the lanes, by index.
        fetched_left: fetched experts that a serial plan's CPU still waits for.
        is_computed: whether all products of the layer step have ended.
        evaluate_ahead: computes dense parts of coming layers, given the layer before
            and their number; None where the model's own work predicts.
        dispatch_s: per layer step, seconds from the end of planning until all work was
            handed out.
        hand_off_s: per layer step, seconds from the end of planning to the first start
            of another worker; NaN where there was none.
    """

    def __init__(
        self, lanes: Lanes, memories: Memories, planner: Planner, timeline: Timeline
    ) -> None:
        self.lanes = lanes.names
        self.submit = lanes.submit
        self.withdraw = lanes.withdraw
        self.offer = lanes.offer
        self.admission = lanes.admission
        self.fetched_left: Callable[[], int] = lambda: 0
        self.is_computed: Callable[[], bool] = lambda: True
        self.evaluate_ahead: Callable[[int, int], None] | None = None
        self.dispatch_s = array("d")
        self.hand_off_s = array("d")
        self._lanes = lanes
        self._memories = memories
        self._planner = planner
        self._timeline = timeline
        # Real runs have one GPU.
        index = {lane: number for number, lane in enumerate(self.lanes)}
        self._cpu = index[kinds.CPU.lane()]
        self._gpu = index[kinds.GPU.lane()]
        self._link = index[kinds.H2D.lane()]
        self._back_link = index[kinds.D2H.lane()]
        self._ssd = index[kinds.SSD.lane()]
        self._control = index[kinds.CONTROL.lane()]
        self._device_worker = lanes.worker(kinds.GPU.lane())
        self._elsewhere = [
            lanes.worker(name) is not lanes.control for name in self.lanes
        ]
        self._asked_s = 0.0
        self._planned_s = 0.0
        self._step = 0

        # Instants of the layer step under way, and what control does beside lanes.
        self._decided_s = 0.0
        self._launched_s = 0.0
        self._computed_s = 0.0
        self._request_s = 0.0
        self._layer = -1
        self._join = self._part(JOIN, 0.0)
        self._unserved: Part | None = None
        self._inline = self._device_worker is lanes.control
        if timeline.operations is not None:
            lanes.control.on_serving = self._serving
            lanes.counts = True

        # What is made ready outside the lock and queued inside it.
        self._products: list[Compute] = []
        self._new_precomputes: list[Precompute] = []
        # Products ahead of the gate for the layer step to come, by key.
        self._coming: dict[int, Precompute] = {}
        # Whose results, by position, the next layer step will join.
        self._deferred: tuple[LayerJob, np.ndarray] | None = None

    # -- operations -------------------------------------------------------------------

    def read(self, step: int, layer: int, expert: int, *, demanded: bool) -> Read:
        """Make the read of an expert."""
        del demanded  # real reads take as long as they take
        return Read(self._memories, self._ssd, READ, (step, layer, expert))

    def copy(self, copies: Copies, position: int, step: int) -> Copy:
        """Make the copy of an expert."""
        place = step, copies.layer, copies.experts[position]
        return Copy(self._memories, self._link, copies.kind, place)

    def computes(self, plan: Plan) -> list[Compute]:
        """The products that `launching` has made; the lock is held."""
        self._launched_s = self._lanes.lock.instant_s
        if plan.serial:
            on_gpu = self._planner.gpu[0].memory.state[plan.work.layer]
            for product in self._products:
                if product.lane == self._gpu and on_gpu[product.expert] != RESIDENT:
                    # The last fetched expert lets the CPU begin: then it must be there.
                    product.settles = lambda: self.fetched_left() == 1
        return self._products

    def precomputes(self, _: Plan) -> list[Precompute]:
        """The products ahead of the gate that `launching` has made."""
        return self._new_precomputes

    def predictions(self, plan: Plan) -> tuple[Prediction, ...]:
        """Make the evaluation of coming layers' dense parts.

        Nothing for a live model, whose hooks have evaluated coming gates by now.
        """
        evaluate = self.evaluate_ahead
        if not plan.dense_parts or evaluate is None:
            return ()
        place = plan.work.step, plan.work.layer
        return (Prediction(self._gpu, place, plan.dense_parts, evaluate),)

    # -- what the engine reports ------------------------------------------------------

    def placed(self, operation: Operation, gpu: int) -> None:
        """Give an expert the slot that its copy or read goes to."""
        key = self._memories.key(operation)
        if gpu < 0:
            self._memories.host.take(key)
        else:
            self._memories.slots.take(key)

    def write_back(self, operation: Operation, layer: int, expert: int) -> None:
        """Copy an expert that leaves its slot to a copy back to host memory."""
        place = operation.step, layer, expert
        self.submit(WriteBack(self._memories, self._back_link, REPLACE, place))

    def computed(self, _: Operation | None) -> None:
        """Wake the control thread, which joins the results."""
        self._computed_s = self._lanes.lock.instant_s
        self._lanes.control.wake()

    # -- one layer step ---------------------------------------------------------------

    def now_s(self) -> float:
        """The instant at which the lock was taken."""
        return self._lanes.lock.instant_s

    def exclusive(self) -> WakingLock:
        """The lanes' lock: nothing starts or ends while it is held."""
        return self._lanes.lock

    def planned(self, plan: Plan) -> tuple[()]:
        """Note the plan and every access; planning has taken its time already."""
        work = plan.work
        self._planned_s = self._lanes.clock_s()
        # Decisions have begun at the instant that the planner was told.
        self._decided_s = self._planner.now_s
        self._note(PLAN, work.layer, self._asked_s, self._planned_s)
        self._timeline.access(
            work.step, work.layer, work.experts, work.tokens, plan.lanes, work.state
        )
        job = self._memories.job
        if work.routing is not job.routed.routing:
            job.reroute(work)
        self.hand_off_s.append(np.nan)
        return NO_WAITS

    def launching(self, plan: Plan) -> None:
        """Make the products, and bring hidden states to where the CPU reads."""
        work = plan.work
        job = self._memories.job
        job.results = [None] * len(work.experts)
        self._products = self._make_products(plan)
        cpu_used = any(product.lane == self._cpu for product in self._products)
        if plan.precompute is not None or cpu_used:
            self._hand_to_cpu(work.layer)
        self._new_precomputes = self._make_precomputes(plan)

    def all_computed(self) -> Callable[[], bool]:
        """Wait for the last product."""
        self.dispatch_s.append(self._lanes.clock_s() - self._planned_s)
        self._unserved = self._part(LAUNCH, self._launched_s)
        return self.is_computed

    def joined(self, plan: Plan, *, cpu_used: bool) -> tuple[()]:
        """Add up the results."""
        del cpu_used  # the device brings the CPU's results over as it joins them
        memories = self._memories
        self.take_in()
        start_s = self._lanes.clock_s()
        memories.job.gather()
        memories.job.answer = self._joined(plan)
        end_s = self._lanes.clock_s()
        self._note(JOIN, plan.work.layer, start_s, end_s)
        # Control joins when the last product has ended, and its own last one.
        picked_s = max(self._computed_s, self._lanes.control.freed_s)
        self._join = self._part(JOIN, picked_s)._replace(start_s=start_s, end_s=end_s)
        return NO_WAITS

    def end_layer(self) -> None:
        """Let the model go on; the lock is held."""
        instant_s = self._lanes.lock.instant_s
        job = self._memories.job
        job.answered = True
        job.answered_s = instant_s
        self._device_worker.wake()
        self._note_parts(instant_s)
        self._lanes.control.freed_s = instant_s
        if not self._inline:
            self._unserved = self._part(RETURN, instant_s)

    def asked(self, layer: int, step: int) -> None:
        """Note that the device asks for a layer: planning begins."""
        self._layer = layer
        self._step = step
        self._unserved = None
        asked_s = self._memories.job.asked_s
        self._request_s = max(asked_s, self._lanes.control.freed_s)
        self._asked_s = self._lanes.clock_s()

    def noting(self, step: int, ended_s: float) -> None:
        """Note that control writes down a forward pass that ended at an instant."""
        self._layer = -1
        self._step = step
        picked_s = max(ended_s, self._lanes.control.freed_s)
        self._unserved = self._part(NOTE, picked_s)

    def take_in(self) -> None:
        """Write down the spans of what has ended."""
        finished = self._lanes.finished
        while finished:
            operation = finished.popleft()
            if operation.end_s < 0.0:
                continue  # the device tells when, later
            self._timeline.spans.extend(
                pack_span(
                    operation.lane,
                    operation.kind,
                    operation.step,
                    operation.layer,
                    operation.expert,
                    operation.start_s,
                    operation.end_s,
                    operation.nbytes,
                )
            )
            self._note_hand_off(operation)
            if self._timeline.operations is not None:
                self._timeline.operations.add(part_of(operation))

    def _joined(self, plan: Plan) -> torch.Tensor:
        """Add up what this layer step awaited: [T, H]."""
        job = self._memories.job
        join = self._memories.device.join
        late = self._deferred
        self._deferred = None
        if plan.deferred:
            is_late = np.isin(plan.work.experts, plan.deferred)
            self._deferred = job, np.flatnonzero(is_late)
            job = job.part(np.flatnonzero(~is_late))
        answer = join(job)
        if late is not None:
            before, positions = late
            answer = answer + join(before.part(positions))
        return answer

    # -- products ---------------------------------------------------------------------

    def _make_products(self, plan: Plan) -> list[Compute]:
        """One product per active expert, but for what was computed ahead."""
        work = plan.work
        experts = work.experts.tolist()
        codes = plan.lanes.tolist()
        precomputed = None if work.precomputed is None else work.precomputed.tolist()
        ahead = self._coming
        self._coming = {}
        first_key = work.layer * self._memories.experts

        products = []
        for position in plan.order:
            expert = experts[position]
            on_cpu = codes[position] == CPU
            only = None
            if precomputed is not None and precomputed[position]:
                rows = ahead[first_key + expert].rows
                missing = self._memories.job.take_precomputed(position, rows)
                if not len(missing):
                    continue
                only = torch.from_numpy(missing)
            product = Compute(
                self._memories,
                self._cpu if on_cpu else self._gpu,
                (work.step, work.layer, expert),
                position,
                on_cpu=on_cpu,
            )
            product.only = only
            products.append(product)
        return products

    def _make_precomputes(self, plan: Plan) -> list[Precompute]:
        """Products of the next layer's experts, for tokens predicted to need them."""
        precompute = plan.precompute
        work = plan.work
        if precompute is None:
            return []
        hidden = self._memories.job.hidden_cpu
        products = []
        for expert in precompute.experts.tolist():
            rows = np.flatnonzero((precompute.routing == expert).any(axis=1))
            product = Precompute(
                self._memories,
                self._cpu,
                (work.step, work.layer + 1, expert),
                hidden,
                PrecomputedRows(rows - len(hidden), hidden),
            )
            self._coming[product.key] = product
            products.append(product)
        return products

    def _hand_to_cpu(self, layer: int) -> None:
        """Bring hidden states to where the CPU reads."""
        job = self._memories.job
        start_s = self._lanes.clock_s()
        job.hidden_cpu, nbytes = self._memories.device.to_host(job.hidden)
        if nbytes:
            end_s = self._lanes.clock_s()
            self._timeline.span(
                self._back_link,
                ACTIVATION,
                self._step,
                layer,
                expert=-1,
                start_s=start_s,
                end_s=end_s,
                nbytes=nbytes,
            )

    # -- instants ---------------------------------------------------------------------

    def _part(self, kind: int, picked_s: float) -> Part:
        """A part of control's time from an instant on."""
        return Part(
            lane=self._control,
            kind=kind,
            step=self._step,
            layer=self._layer,
            expert=-1,
            picked_s=picked_s,
            start_s=-1.0,
            end_s=-1.0,
            ended_s=-1.0,
        )

    def close(self) -> None:
        """Let go of whoever holds this world."""
        self.evaluate_ahead = None
        self.fetched_left = lambda: 0
        self.is_computed = lambda: True
        self._products = []
        self._new_precomputes = []
        self._coming = {}
        self.admission.decide = Admission().decide
        self._lanes.control.on_serving = None

    def _serving(self) -> None:
        """Note that control begins to serve its lanes; the lock is held."""
        part = self._unserved
        operations = self._timeline.operations
        if part is not None and operations is not None:
            instant_s = self._lanes.lock.instant_s
            operations.add(part._replace(end_s=instant_s, ended_s=instant_s))
        self._unserved = None

    def _note_parts(self, instant_s: float) -> None:
        """Write down control's parts of a layer step that ends at this instant."""
        operations = self._timeline.operations
        if operations is None:
            return
        request = self._part(REQUEST, self._request_s)
        operations.add(request._replace(ended_s=self._decided_s))
        plan = self._part(PLAN, self._decided_s)
        operations.add(
            plan._replace(
                start_s=self._asked_s,
                end_s=self._planned_s,
                ended_s=self._launched_s,
            )
        )
        operations.add(self._join._replace(ended_s=instant_s))

    # -- spans ------------------------------------------------------------------------

    def _note(self, kind: int, layer: int, start_s: float, end_s: float) -> None:
        """Write a span of control down."""
        self._timeline.span(
            self._control,
            kind,
            self._step,
            layer,
            expert=-1,
            start_s=start_s,
            end_s=end_s,
            nbytes=0,
        )

    def _note_hand_off(self, operation: Operation) -> None:
        """Note when the first other worker has begun after planning."""
        if not self.hand_off_s or operation.kind == DENSE:
            return
        if not self._elsewhere[operation.lane] or not np.isnan(self.hand_off_s[-1]):
            return
        if operation.start_s >= self._planned_s:
            self.hand_off_s[-1] = operation.start_s - self._planned_s

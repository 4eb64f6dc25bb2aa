"""The real world: operations that really read, copy and compute, on real workers.

Everything that follows from a plan is the engine's (`moesim.engine`). One thing exists
only here: products ahead of the gate are made for certain tokens, and a token that
needs such an expert without having been predicted for it is served in the expert's own
layer, on its own input.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moesim.engine.durations import durations_of
from moesim.engine.layer_step import LayerStep
from moesim.engine.names import (
    AHEAD,
    AWAITED_AHEAD,
    COPIED,
    FETCHED,
    HAS_READ,
    PARTLY,
    PREDICTED,
    UNAWAITED,
)
from moesim.hwprofiles import lanes as kinds
from moesim.policies.names import CPU
from moesim.runtime.executor.lanes import nothing_to_do
from moesim.runtime.executor.memories import PrecomputedRows
from moesim.runtime.executor.operations import (
    Compute,
    Precompute,
)
from moesim.traces.format.schema import Phase
from moesim.traces.timeline.operations import LAUNCH, NOTE, REQUEST, RETURN, Part
from moesim.traces.timeline.spans import ACTIVATION, JOIN, PLAN, pack_span

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.engine.operations import Operation
    from moesim.engine.plan import Plan
    from moesim.engine.planner import Planner
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.base import Work
    from moesim.runtime.executor.lanes import Lanes, Task
    from moesim.runtime.executor.memories import LayerJob
    from moesim.runtime.executor.operations import ExpertTask, Memories
    from moesim.traces.timeline.spans import Timeline


def part_of(task: Task) -> Part:
    """When a task kept its worker."""
    part = Part(
        lane=task.lane,
        kind=task.kind,
        step=task.step,
        layer=task.layer,
        expert=task.expert,
        picked_s=task.picked_s,
        start_s=task.start_s,
        end_s=task.end_s,
        ended_s=task.ended_s,
    )
    if task.counters is None:
        return part
    return part._replace(**task.counters._asdict())


class RealLayerStep(LayerStep):
    """Layer steps on real lanes: decides, launches and joins what the device asks for.

    Between two layer steps products ahead of the gate run where the CPU lane has a
    thread that is free: its own, or the control thread, which waits. Where that thread
    also runs the model (one core for everything), they begin with the next layer step.

    Attributes:
        evaluate_ahead: computes dense parts of coming layers, given the layer before
            and their number; None where the model's own work predicts.
        answered: layer steps so far.
    """

    def __init__(
        self,
        lanes: Lanes,
        memories: Memories,
        planner: Planner,
        profile: HardwareProfile,
        timeline: Timeline,
    ) -> None:
        durations = durations_of(profile, planner)
        super().__init__(lanes.machine, lanes, planner, durations)
        lanes.machine.consequences = self
        lanes.machine.gate = self.transfers
        lanes.make = self._task
        self.evaluate_ahead: Callable[[int, int], None] | None = None
        self.answered = 0
        self._lanes = lanes
        self._memories = memories
        self._timeline = timeline
        # Real runs have one GPU.
        self._cpu = durations.compute[0]
        self._gpu = durations.compute[1]
        self._back_link = durations.back[0]
        self._control = durations.control
        self._device_worker = lanes.worker(kinds.GPU.lane())
        self._asked_s = 0.0
        self._planned_s = 0.0

        # Instants of the layer step under way, and what control does beside lanes.
        self._decided_s = 0.0
        self._launched_s = 0.0
        self._computed_s = 0.0
        self._request_s = 0.0
        self._layer = -1
        self._join = self._part(JOIN, 0.0)
        self._unserved: Part | None = None
        self._inline = self._device_worker is lanes.control
        durations.inline = self._inline
        if timeline.operations is not None:
            lanes.control.on_serving = self._serving
            lanes.counts = True

        self._moves: dict[int, Callable[[int], Any]] = {
            COPIED: memories.copy,
            HAS_READ: memories.read,
            UNAWAITED: memories.write_back,
        }
        # Made ready outside the lock, by key: what starts when its operation does.
        self._products: dict[int, Compute] = {}
        # Likewise of what no layer step awaits yet, first queued first.
        self._ahead_of: dict[int, deque[ExpertTask]] = {}
        # Products ahead of the gate for the layer step to come, by key.
        self._coming: dict[int, Precompute] = {}
        # Whose results, by position, the next layer step will join.
        self._deferred: tuple[LayerJob, np.ndarray] | None = None

    def predict_by(self, evaluate: Callable[[int, int], None]) -> None:
        """Let predictions that need coming layers' dense parts compute them.

        A live model's hooks have evaluated coming gates by the time that it asks.
        """
        self.evaluate_ahead = evaluate
        for phase in Phase:
            for layer in range(self.layers):
                parts = self.planner.evaluations(layer, phase).dense_parts
                self.dense_parts[int(phase) * self.layers + layer] = parts

    # -- one layer step ---------------------------------------------------------------

    def answer(self, s: int) -> None:
        """Walk one layer step of the planner's block; serve control's own lanes while
        the others work.
        """
        lanes = self._lanes
        planner = self.planner
        job = self._memories.job
        self._layer = job.block.layer[s]
        self.step = job.block.step[s]
        self._unserved = None
        self._request_s = max(job.asked_s, lanes.control.freed_s)
        self._asked_s = lanes.clock_s()

        # Nothing starts while plans are made: what a plan saw must hold.
        with lanes.lock:
            self.begin(s)
            self._decided_s = lanes.now_s
        plan = planner.plan(s, self._decided_s)
        self.answered += 1
        self._note_plan(planner.work, plan)
        self._make_ready(planner.work, plan)

        # Lanes work.
        with lanes.lock:
            self._launched_s = lanes.now_s
            self.launch(s)
        self._unserved = self._part(LAUNCH, self._launched_s)
        lanes.control.serve(self._is_computed)

        # Results join, holds are released, and the cache may replace what it likes.
        self.take_in()
        start_s = lanes.clock_s()
        job.gather()
        job.answer = self._joined(planner.work, plan)
        end_s = lanes.clock_s()
        self._note(JOIN, self._layer, start_s, end_s)
        # Control joins when the last product has ended, and its own last one.
        picked_s = max(self._computed_s, lanes.control.freed_s)
        self._join = self._part(JOIN, picked_s)._replace(start_s=start_s, end_s=end_s)
        with lanes.lock:
            self.complete()
            self._let_go_on(job)

    def all_computed(self) -> None:
        """Note the instant, and wake the control thread, which joins the results."""
        self._computed_s = self._lanes.now_s
        super().all_computed()

    def _is_computed(self) -> bool:
        return not self.pending

    def _let_go_on(self, job: LayerJob) -> None:
        """Let the model go on; the lock is held."""
        instant_s = self._lanes.now_s
        job.answered = True
        job.answered_s = instant_s
        if not self._inline:
            self._device_worker.take()
        self._note_parts(instant_s)
        self._lanes.control.freed_s = instant_s
        if not self._inline:
            self._unserved = self._part(RETURN, instant_s)

    def noting(self, step: int, ended_s: float) -> None:
        """Note that control writes down a forward pass that ended at an instant."""
        self._layer = -1
        self.step = step
        picked_s = max(ended_s, self._lanes.control.freed_s)
        self._unserved = self._part(NOTE, picked_s)

    def _note_plan(self, work: Work, plan: Plan) -> None:
        """Note the plan and every access; planning has taken its time already."""
        self._planned_s = self._lanes.clock_s()
        self._note(PLAN, work.layer, self._asked_s, self._planned_s)
        active = work.active
        self._timeline.access(
            work.step,
            work.layer,
            np.array(work.experts),
            np.array(work.tokens),
            np.array(plan.lanes[:active]),
            np.array(work.state[:active]),
        )
        if self.planner.alters_now:
            self._memories.job.reroute(*self.planner.used_routing())

    # -- what is really done ----------------------------------------------------------

    def _task(self, operation: Operation) -> Task:
        """Make what is done for an operation that starts now; the lock is held."""
        key = operation.layer * self.experts + operation.expert
        follows = operation.follows
        if follows in {AHEAD, AWAITED_AHEAD}:
            return self._ahead_of[key].popleft()
        if follows in self._moves:
            work = partial(self._moves[follows], key)
        elif follows == PREDICTED:
            assert self.evaluate_ahead is not None
            row = self.planner.work.phase * self.layers
            parts = self.dense_parts[row + operation.layer]
            work = partial(self.evaluate_ahead, operation.layer, parts)
        else:
            product = self._products.pop(key)
            if follows == FETCHED:
                # The last fetched expert lets the CPU begin: then it must be there.
                product.settles = self._fetches_last
            return product
        task = nothing_to_do(operation)
        task.work = work
        return task

    def _fetches_last(self) -> bool:
        return self.fetched == 1

    def take_in(self) -> None:
        """Write down the spans of what has ended."""
        finished = self._lanes.finished
        while finished:
            task = finished.popleft()
            if task.end_s < 0.0:
                continue  # the device tells when, later
            self._timeline.spans.extend(
                pack_span(
                    task.lane,
                    task.kind,
                    task.step,
                    task.layer,
                    task.expert,
                    task.start_s,
                    task.end_s,
                    task.nbytes,
                )
            )
            if self._timeline.operations is not None:
                self._timeline.operations.add(part_of(task))

    def _joined(self, work: Work, plan: Plan) -> torch.Tensor:
        """Add up what this layer step awaited: [T, H]."""
        job = self._memories.job
        join = self._memories.device.join
        late = self._deferred
        self._deferred = None
        if plan.defers:
            is_late = np.array(plan.deferred[: work.active], np.bool_)
            if is_late.any():
                self._deferred = job, np.flatnonzero(is_late)
                job = job.part(np.flatnonzero(~is_late))
        answer = join(job)
        if late is not None:
            before, positions = late
            answer = answer + join(before.part(positions))
        return answer

    # -- products ---------------------------------------------------------------------

    def _make_ready(self, work: Work, plan: Plan) -> None:
        """Make the products, and bring hidden states to where the CPU reads."""
        job = self._memories.job
        job.results = [None] * work.active
        self._products = {}
        cpu_used = plan.begins_ahead
        ahead = self._coming
        self._coming = {}
        for position in range(work.active):
            key = work.first + work.experts[position]
            on_cpu = plan.lanes[position] == CPU
            only = None
            if plan.has_precomputed and plan.precomputed[position]:
                missing = job.take_precomputed(position, ahead[key].rows)
                if not len(missing):
                    continue
                plan.precomputed[position] = PARTLY
                only = torch.from_numpy(missing)
            product = Compute(
                self._memories,
                self._cpu if on_cpu else self._gpu,
                (work.step, work.layer, work.experts[position]),
                position,
                on_cpu=on_cpu,
            )
            product.only = only
            cpu_used = cpu_used or on_cpu
            if plan.defers and plan.deferred[position]:
                self._ahead_of.setdefault(key, deque()).append(product)
            else:
                self._products[key] = product
        if cpu_used:
            self._hand_to_cpu(work.layer)
        if plan.begins_ahead:
            self._make_precomputes(work, plan)

    def _make_precomputes(self, work: Work, plan: Plan) -> None:
        """Products of the next layer's experts, for tokens predicted to need them."""
        planner = self.planner
        columns = planner.routed_columns
        routed = np.asarray(planner.routed)[: work.rows * columns]
        routing = routed.reshape(work.rows, columns)
        hidden = self._memories.job.hidden_cpu
        for expert in range(self.experts):
            if not plan.ahead_tokens[expert]:
                continue
            rows = np.flatnonzero((routing == expert).any(axis=1))
            product = Precompute(
                self._memories,
                self._cpu,
                (work.step, work.layer + 1, expert),
                hidden,
                PrecomputedRows(rows - len(hidden), hidden),
            )
            self._coming[product.key] = product
            self._ahead_of.setdefault(product.key, deque()).append(product)

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
                self.step,
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
            step=self.step,
            layer=self._layer,
            expert=-1,
            picked_s=picked_s,
            start_s=-1.0,
            end_s=-1.0,
            ended_s=-1.0,
        )

    def close(self) -> None:
        """Let go of whoever holds these layer steps."""
        self.evaluate_ahead = None
        self._products = {}
        self._ahead_of = {}
        self._coming = {}
        self._deferred = None
        lanes = self._lanes
        lanes.make = nothing_to_do
        lanes.machine.consequences = lanes.machine.gate = None
        lanes.control.on_serving = None

    def _serving(self) -> None:
        """Note that control begins to serve its lanes; the lock is held."""
        part = self._unserved
        operations = self._timeline.operations
        if part is not None and operations is not None:
            instant_s = self._lanes.now_s
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
            self.step,
            layer,
            expert=-1,
            start_s=start_s,
            end_s=end_s,
            nbytes=0,
        )

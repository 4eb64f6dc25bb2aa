"""The layer step, for real: the same planner as in the simulator, and lanes that work.

Two threads of thought meet here. The *device's* runs the model: the dense part of a
layer, then it asks for the experts and, until it is answered, serves its lanes
(products from its own slots, copies into them). The *control* thread answers: it takes
in what has landed, plans, hands out work once per lane and layer, computes its share of
the experts, and joins the results. On CUDA both are the same thread, since the device
is elsewhere and only launches happen here; on one core they are the same because there
is only one.

T tokens, K experts per token, A active experts, P token-expert pairs, H hidden.
"""

from __future__ import annotations

import gc
import os
import sys
from array import array
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from moesim.runtime.errors import RuntimeFault
from moesim.runtime.executor.dispatch import Computes
from moesim.runtime.executor.host_device import spare_record
from moesim.runtime.executor.lanes import Lanes, Operation, Stopped
from moesim.runtime.executor.operations import Forward, Job
from moesim.runtime.executor.slot_map import HostPlaces, Places, cache_slots
from moesim.runtime.executor.transfers import Transfers
from moesim.traces.format.schema import Phase
from moesim.traces.timeline.spans import (
    ACTIVATION,
    DENSE,
    JOIN,
    PLAN,
    REPLACE,
    pack_span,
)
from moesim.traces.timeline.spans import FETCH as FETCHED
from moesim.traces.timeline.spans import READ as WAS_READ

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.planner.planner import Planner
    from moesim.runtime.executor.cuda_device import CudaDevice
    from moesim.runtime.executor.host_device import HostDevice
    from moesim.runtime.executor.lanes import Worker
    from moesim.runtime.models.expert_math import Groups
    from moesim.runtime.store.store import ExpertStore
    from moesim.traces.format.batch import RoutedLayer
    from moesim.traces.timeline.spans import Timeline

SWITCH_INTERVAL_S: Final = 1e-4
"""How long a thread may keep the interpreter while another wants it; Python's default
of 5 ms is a layer's time.
"""


class StepInfo(NamedTuple):
    """One forward pass, as the timeline notes it."""

    step: int
    phase: Phase
    batch: int
    tokens: int
    sequences: int


class ExecutorResult(NamedTuple):
    """What a run did. The two arrays have one entry per layer step.

    Attributes:
        steps: forward passes.
        layer_steps: MoE layers of all of them.
        dispatch_s: control's time from the end of planning until all work was handed
            out.
        hand_off_s: from the end of planning to the first start of another worker; NaN
            if there was none.
        makespan_s: wall seconds.
    """

    steps: int
    layer_steps: int
    dispatch_s: np.ndarray
    hand_off_s: np.ndarray
    makespan_s: float


class Executor:
    """One run: a planner, lanes, and memories with real experts in them.

    Args:
        profile: lanes, workers and their order; one GPU, or the host accelerator.
        planner: a `Planner`, or a `Journal` around one.
        timeline: where spans, accesses and steps go.
        store: the experts.
        device: what the `gpu0` lane runs on.
        gatings: per layer, the model's own gating function or None (`MoeLayer.gating`).
        own_cores: give the host accelerator the last core and control the others, for
            machines that are otherwise idle: the scheduler may else wake a lane on the
            core of whoever woke it (docs/explanation/runtime.md).

    Raises:
        RuntimeFault: a memory cannot be had.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        planner: Planner,
        timeline: Timeline,
        store: ExpertStore,
        device: HostDevice | CudaDevice,
        gatings: Sequence[Callable[[torch.Tensor], torch.Tensor] | None] | None = None,
        *,
        own_cores: bool = False,
    ) -> None:
        self._planner = planner
        self._timeline = timeline
        self._store = store
        self.device = device
        shape = planner.shape
        sizes = planner.sizes
        self.experts = shape.experts
        self.layouts = [store.layout(layer) for layer in range(store.layers)]
        self.gatings = list(gatings or [None] * store.layers)
        self.job = Job.nothing()
        host_memory = planner.host.memory if planner.host is not None else None
        self.host = HostPlaces(
            store,
            host_memory,
            sizes.host,
            sizes.staging,
            shape.expert_bytes,
            page_lock=device.page_lock,
        )
        try:
            slots = device.allocate(
                cache_slots(sizes.gpu, shape.expert_bytes) + sizes.staging,
                store.slot_bytes,
            )
        except BaseException:
            self.host.close()
            raise
        self.places = Places(slots, planner.gpu[0].memory, store, sizes.staging)
        gates = {"h2d0": self.places} | (
            {"ssd": self.host.gate} if self.host.gate is not None else {}
        )
        self.lanes = Lanes(profile, gates, device.with_control)
        self._transfers = Transfers(
            self.lanes, planner, store, self.host, self.places, device
        )
        self.host.freed = self.lanes.worker("ssd").offer
        self.link = self.lanes.worker("h2d0")
        self._device_worker = self.lanes.worker("gpu0")
        self._inline = self._device_worker is self.lanes.control
        names = profile.lanes
        self._gpu, cpu, self._control, self._d2h = map(
            names.index, ("gpu0", "cpu", "control", "d2h0")
        )
        self._lane_of = np.array([cpu, self._gpu], np.int8)
        self.computes = Computes(self, planner, self._transfers, cpu, self._gpu)
        self._elsewhere = [
            self.lanes.worker(name) is not self.lanes.control for name in names
        ]
        self._own_cores = own_cores and not self._inline
        self._requests: deque[Job | tuple[StepInfo, float, float]] = deque()
        self._forward: Forward | None = None
        self._progress: Callable[[StepInfo], None] = lambda _info: None
        self._step = 0
        self._phase = Phase.DECODE
        self._batch = 0
        self._step_start_s = self._resumed_s = self._planned_s = 0.0
        self._dispatch_s = array("d")
        self._hand_off_s = array("d")
        self._steps = 0

    def fill(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Bring what is resident from the start into host memory and device slots. Call
        once, before `run`.

        Args:
            progress: called with records read and records to read.

        Returns:
            Bytes read from the store.

        Raises:
            StoreError, RuntimeFault: the store cannot be read.
        """
        read = self.host.load(progress)
        keys = self.places.residents()
        self.places.assign(keys)
        if self.host.gate is None:
            for key in keys:
                self.device.copy(
                    self.places.slot(key),
                    self.host.record(key),
                    self._store.record_bytes(key // self.experts),
                )
            return read
        with spare_record(
            self._store.slot_bytes
        ) as spare:  # host memory need not hold what the device holds
            for key in keys:
                nbytes = self._store.read_into(
                    *divmod(key, self.experts), spare.record(0)
                )
                self.device.copy(self.places.slot(key), spare.record(0), nbytes)
                read += nbytes
        return read

    def run(
        self,
        forward: Callable[[], None],
        progress: Callable[[StepInfo], None] | None = None,
    ) -> ExecutorResult:
        """Run `forward` on the device and answer its requests until it ends.

        Raises:
            PolicyError: a policy answered something illegal.
            StoreError, RuntimeFault: a disk or a memory failed. Whatever is raised, all
                threads have ended.
        """
        lanes = self.lanes
        self._progress = progress or self._progress
        with (
            _undisturbed(lanes.control.threads),
            _apart(self._device_worker, self.lanes.worker("ssd"), on=self._own_cores),
            torch.inference_mode(),
        ):
            lanes.open()
            self.device.begin(lanes.began_s)
            try:
                if self._inline:
                    forward()
                else:
                    self._forward = Forward(self._gpu, forward, lanes.control)
                    lanes.post([(self._forward, 0)])
                    while not self._forward.done or self._requests:
                        lanes.control.serve(self._asked)
                        self._answer()
                makespan_s = lanes.clock_s()
            except Stopped:
                _raise_failure(lanes.failure)
                raise
            except (MemoryError, torch.OutOfMemoryError) as error:
                _raise_failure(error)
            finally:
                lanes.close()
            self._take_in()
            self.device.step_done(self._timeline)
        _raise_failure(lanes.failure)
        return ExecutorResult(
            self._steps,
            len(self._dispatch_s),
            np.array(self._dispatch_s),
            np.array(self._hand_off_s),
            makespan_s,
        )

    def close(self) -> None:
        """Let go of host memory and slots."""
        self.host.close()
        self.places.slots.close()

    # -- the device's side -------------------------------------------------------------

    def begin_step(self, step: int, phase: Phase, batch: int) -> None:
        """Note that a forward pass begins."""
        self._step = step
        self._phase = phase
        self._batch = batch
        self._step_start_s = self._resumed_s = self.lanes.clock_s()
        self.device.mark()

    def layer(
        self,
        routed: RoutedLayer,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        groups: Groups,
    ) -> torch.Tensor:
        """Ask for the experts of one layer; serve the device's lanes until they are
        there.

        Args:
            routed: what the gate decided, for the planner.
            hidden: [T, H].
            weights: [T, K] combine weights.
            groups: the pairs of the same routing, by expert.

        Returns:
            [T, H].
        """
        job = Job(routed, hidden, weights, groups)
        self._dense_done(routed.layer)
        if self._inline:
            self._layer_step(job)
        else:
            with self.lanes.lock:
                self._requests.append(job)
                self.lanes.control.wake()
            self._device_worker.serve(job.is_answered)
        self._resumed_s = self.lanes.clock_s()
        self.device.mark()
        return job.answer

    def end_step(self, tokens: int, sequences: int) -> None:
        """Note that a forward pass has ended; what came after the last layer was its
        head.
        """
        self._dense_done(-1)
        self.device.step_done(self._timeline)
        info = StepInfo(self._step, self._phase, self._batch, tokens, sequences)
        with self.lanes.lock:
            self._requests.append((info, self._step_start_s, self.lanes.clock_s()))
            self.lanes.control.wake()
        if self._inline:
            self._answer()

    def _dense_done(self, layer: int) -> None:
        operation = Operation(self._gpu, DENSE, self._step, layer)
        operation.start_s, operation.end_s = self._resumed_s, self.lanes.clock_s()
        self.device.marked(operation)
        self.lanes.finished.append(operation)

    # -- the control side --------------------------------------------------------------

    def _asked(self) -> bool:
        return bool(self._requests) or (
            self._forward is not None and self._forward.done
        )

    def _answer(self) -> None:
        """Work through the device's requests."""
        while self._requests:
            request = self._requests.popleft()
            if isinstance(request, Job):
                self._layer_step(request)
                continue
            info, start_s, end_s = request
            self._take_in()
            self._timeline.step(
                info.step,
                info.phase,
                info.batch,
                info.tokens,
                info.sequences,
                start_s,
                end_s,
            )
            self._steps += 1
            self._progress(info)

    def _layer_step(self, job: Job) -> None:
        """One layer step, in the order of the contract (design §5)."""
        lanes = self.lanes
        planner = self._planner
        step = self._step
        layer = job.routed.layer
        start_s = lanes.clock_s()
        # 2. what has landed, and late prefetches
        with lanes.lock:
            self.host.freeze()
        self._take_in()
        with lanes.lock:
            self._transfers.begin_layer(layer, job.routed.experts)
        # 3. and 4. routing and planning
        plan = planner.plan(job.routed, step, self._phase, start_s, self._batch)
        self._planned_s = lanes.clock_s()
        self._note(self._control, PLAN, layer, start_s, self._planned_s)
        work = plan.work
        self._timeline.access(
            step,
            layer,
            work.experts,
            work.tokens,
            self._lane_of[plan.lanes],
            work.state,
        )
        if work.routing is not job.routed.routing:
            job.reroute(work)
        # 5. lanes work
        self._hand_off_s.append(np.nan)
        self.computes.dispatch(job, plan)
        self._dispatch_s.append(lanes.clock_s() - self._planned_s)
        lanes.control.serve(job.is_computed)
        # 6. results join
        with lanes.lock:
            self.host.freeze()
        self._take_in()
        start_s = lanes.clock_s()
        job.gather()
        job.answer = self.device.join(job)
        joined_s = lanes.clock_s()
        self._note(self._control, JOIN, layer, start_s, joined_s)
        swaps = planner.complete(plan, joined_s)
        self.computes.make_way(swaps)
        with lanes.lock:
            self.computes.complete()
            self._transfers.vacate(swaps)
            for copies in swaps:
                self._transfers.enqueue(copies, step)
            self.host.thaw()
            job.answered = True
            self._device_worker.wake()

    def hand_to_cpu(self, job: Job, layer: int) -> None:
        """Bring hidden states to where the CPU reads."""
        start_s = self.lanes.clock_s()
        job.hidden_cpu, nbytes = self.device.to_host(job.hidden)
        if nbytes:
            self._note(
                self._d2h, ACTIVATION, layer, start_s, self.lanes.clock_s(), nbytes
            )

    def _note(
        self,
        lane: int,
        kind: int,
        layer: int,
        start_s: float,
        end_s: float,
        nbytes: int = 0,
    ) -> None:
        self._timeline.span(lane, kind, self._step, layer, -1, start_s, end_s, nbytes)

    def _take_in(self) -> None:
        """Report landings to the planner in the order in which they happened, and write
        spans down.
        """
        finished = self.lanes.finished
        spans = self._timeline.spans
        planner = self._planner
        while finished:
            op = finished.popleft()
            if op.kind == WAS_READ:
                planner.read_done(op.layer, op.expert)
            elif FETCHED <= op.kind <= REPLACE:
                planner.landed(0, op.layer, op.expert)
            if op.end_s < 0.0:
                continue  # the device tells when, later
            spans.extend(
                pack_span(
                    op.lane,
                    op.kind,
                    op.step,
                    op.layer,
                    op.expert,
                    op.start_s,
                    op.end_s,
                    op.nbytes,
                )
            )
            if (
                self._elsewhere[op.lane]
                and self._hand_off_s
                and op.kind != DENSE
                and np.isnan(self._hand_off_s[-1])
            ):
                self._note_hand_off(op)

    def _note_hand_off(self, operation: Operation) -> None:
        if operation.start_s >= self._planned_s:
            self._hand_off_s[-1] = operation.start_s - self._planned_s


def _raise_failure(failure: BaseException | None) -> None:
    """Raise what a run died of; memory that ran out in the words of a user."""
    if isinstance(failure, (MemoryError, torch.OutOfMemoryError)):
        said = (str(failure).splitlines() or ["no more memory"])[0]
        raise RuntimeFault(
            f"out of memory during the run: {said}; ask for a smaller expert cache or"
            " batch"
        ) from None
    if failure is not None:
        raise failure


@contextmanager
def _apart(device: Worker, reader: Worker, *, on: bool) -> Iterator[None]:
    """Keep the calling thread off the last core, and the device's worker on it, where
    there are several.

    Who reads from the SSD sits beside the device's worker: it has a moment's work
    between long waits, and woken on the calling thread's core, where the scheduler
    often puts it, it begins 1 to 3 ms later, behind that one's products.
    """
    if (
        not on
        or not hasattr(os, "sched_getaffinity")
        or len(cores := sorted(os.sched_getaffinity(0))) < 2
    ):
        yield
        return
    device.cores = {cores[-1]}
    if reader is not device:
        reader.cores = device.cores
    os.sched_setaffinity(0, cores[:-1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _undisturbed(threads: int) -> Iterator[None]:
    """Let lanes change hands quickly, keep the garbage collector away from what will
    stay, and share cores out.
    """
    interval_s = sys.getswitchinterval()
    before = torch.get_num_threads()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        sys.setswitchinterval(interval_s)
        gc.unfreeze()

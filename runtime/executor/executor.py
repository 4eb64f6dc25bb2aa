"""Runs a model's forward passes on real lanes, with a planner that decides.

Two threads meet here. The *device's* runs the model: the dense part of a layer, then it
asks for the experts and, until it is answered, serves its lanes (products from its own
slots, copies into them). The *control* thread answers: it walks the engine's layer
step, computes its share of the experts, and joins the results. On CUDA both are the
same thread, since the device is elsewhere and only launches happen here; on one core
they are the same because there is only one.

T tokens, K experts per token, H hidden.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from moesim.base.errors import RuntimeFault
from moesim.hwprofiles.lanes import GPU, SSD
from moesim.policies.cache.static import Static
from moesim.runtime.executor.device import spare_record
from moesim.runtime.executor.lanes import Lanes, Stopped, Task
from moesim.runtime.executor.memories import (
    HostSlotMap,
    LayerJob,
    SlotMap,
    cache_slots,
    residents,
)
from moesim.runtime.executor.operations import Forward, Memories
from moesim.runtime.executor.world import RealLayerStep
from moesim.runtime.store.memory import HostSlots
from moesim.traces.format.batch import RoutedStep
from moesim.traces.format.schema import Phase
from moesim.traces.timeline.spans import DENSE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moesim.engine.block import Block
    from moesim.engine.planner import Planner
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.runtime.executor.device import HostDevice
    from moesim.runtime.executor.lanes import Worker
    from moesim.runtime.measure.profile import Counters
    from moesim.runtime.models.expert_layout import Groups
    from moesim.runtime.store.store import ExpertStore
    from moesim.traces.format.batch import RoutedLayer
    from moesim.traces.timeline.spans import Timeline

SWITCH_INTERVAL_S: Final = 1e-4
"""How long a thread may keep the interpreter while another wants it; Python's default
of 5 ms is a layer's time.
"""


class StepInfo(NamedTuple):
    """A forward pass that the device has ended, as the timeline notes it."""

    step: int
    phase: Phase
    batch: int
    tokens: int
    sequences: int
    start_s: float
    end_s: float


class ExecutorResult(NamedTuple):
    """How much a run did: forward passes, MoE layers of all of them, wall seconds."""

    steps: int
    layer_steps: int
    makespan_s: float


class Executor:
    """One run: a planner, lanes, and memories with real experts in them.

    Args:
        profile: lanes, workers and their order; one GPU, or the host accelerator.
        planner: its policies and memories.
        timeline: where spans, accesses and steps go.
        store: the experts.
        device: what the `gpu0` lane runs on.
        gatings: per layer, the model's own gating function or None
            (`OffloadedModel.gatings`).
        own_cores: give the host accelerator the last core and control the others, for
            machines that are otherwise idle: the scheduler may else wake a lane on the
            core of whoever woke it (docs/explanation/runtime.md).

    Raises:
        RuntimeFault: a memory cannot be had.

    Attributes:
        planner: decides.
        layer_step: carries out what it decides.
        lanes: the workers.
        memories: where experts are.
        device: what the `gpu0` lane runs on.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        planner: Planner,
        timeline: Timeline,
        store: ExpertStore,
        device: HostDevice,
        gatings: Sequence[Callable[[torch.Tensor], torch.Tensor] | None] | None = None,
        *,
        own_cores: bool = False,
    ) -> None:
        self.device = device
        self.planner = planner
        self._timeline = timeline
        self._store = store
        self.memories = _allocate(planner, store, device, gatings)
        self.lanes = Lanes(profile, device.with_control)
        self._device_worker = self.lanes.worker(GPU.lane())
        self._inline = self._device_worker is self.lanes.control
        self._own_cores = own_cores and not self._inline
        self._gpu = profile.lanes.index(GPU.lane())

        self.layer_step = RealLayerStep(
            self.lanes, self.memories, planner, profile, timeline
        )

        # What the device asks of control: experts of a layer, or to note a step's end.
        self._requests: deque[LayerJob | StepInfo] = deque()
        self._forward: Forward | None = None
        self._progress: Callable[[StepInfo], None] = lambda _info: None
        self._step = 0
        self._phase = Phase.DECODE
        self._batch = 0
        # The pass under way, where a trace has told all of it beforehand.
        self._block: Block | None = None
        self._step_start_s = 0.0
        self._resumed_s = 0.0
        self._resumed: Counters | None = None
        # Instant from which the device's thread may go on with the model.
        self._goes_on_s = 0.0
        self._steps = 0

    def fill(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Bring what is resident from the start into host memory and device slots.

        Call once, before `run`.

        Args:
            progress: called with records read and records to read.

        Returns:
            Bytes read from the store.

        Raises:
            StoreError, RuntimeFault: the store cannot be read.
        """
        host = self.memories.host
        slots = self.memories.slots
        experts = self.memories.experts
        read = host.load(progress)
        with spare_record(self._store.slot_bytes) as spare:
            for key in slots.take_residents():
                nbytes = self._store.record_bytes(key // experts)
                if host.holds_always(key):
                    record = host.record(key)
                else:
                    record = spare.record(0)
                    read += self._store.read_into(*divmod(key, experts), record)
                self.device.copy(slots.slot(key), record, nbytes)
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
            _apart(self._device_worker, lanes.worker(SSD.lane()), on=self._own_cores),
            torch.inference_mode(),
            lanes.interrupts,
        ):
            lanes.open()
            try:
                self.device.begin(lanes.began_s)
                self._serve(forward)
                makespan_s = lanes.clock_s()
            except Stopped:
                _raise_failure(lanes.failure)
                raise
            except (MemoryError, torch.OutOfMemoryError) as error:
                _raise_failure(error)
            finally:
                lanes.close()
            self.layer_step.take_in()
            self.device.step_done(self._timeline)
        _raise_failure(lanes.failure)
        return ExecutorResult(
            steps=self._steps,
            layer_steps=self.layer_step.answered,
            makespan_s=makespan_s,
        )

    def _serve(self, forward: Callable[[], None]) -> None:
        """Run the model, here or on the device's thread, and answer what it asks."""
        if self._inline:
            forward()
            return
        control = self.lanes.control
        self._forward = Forward(self._gpu, forward, control)
        with self.lanes.lock:
            self.lanes.machine.take(self._gpu)
            self._device_worker.hand(self._forward)
        while not self._forward.done or self._requests:
            control.serve(self._is_asked)
            self._answer()

    def close(self) -> None:
        """Let go of host memory, slots and the model."""
        # Objects that hold each other stay until the garbage collector happens to come
        # by, with the dense weights and all records of a run.
        self._forward = None
        self.layer_step.close()
        self.lanes.finished.clear()
        self.memories.close()

    # -- the device's side ------------------------------------------------------------

    def begin_step(
        self, step: int, phase: Phase, batch: int, block: Block | None = None
    ) -> None:
        """Note that a forward pass begins; `block`, if a trace tells all of it."""
        self._block = block
        self._step = step
        self._phase = phase
        self._batch = batch
        self._resumed = self._counters()
        self._step_start_s = self._resumed_s = self.lanes.clock_s()
        self.device.mark()

    def layer(
        self,
        routed: RoutedLayer,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        groups: Groups,
    ) -> torch.Tensor:
        """Ask for the experts of one layer; serve the device's lanes until then.

        Args:
            routed: what the gate decided, for the planner.
            hidden: [T, H].
            weights: [T, K] combine weights.
            groups: the pairs of the same routing, by expert.

        Returns:
            [T, H].
        """
        job = LayerJob(routed, hidden, weights, groups, self.device.send)
        job.block, job.place = self._block_with(routed)
        dense = self._dense_part(routed.layer)
        with self.lanes.lock:
            job.asked_s = self._note_dense(dense)
            if not self._inline:
                self._ask(job)
                self._device_worker.release()
        if self._inline:
            self._run_layer(job)
        else:
            self._device_worker.serve(job.is_answered, released=True)
        self._goes_on_s = job.answered_s
        self._resumed = self._counters()
        self._resumed_s = self.lanes.clock_s()
        self.device.mark()
        return job.answer

    def _block_with(self, routed: RoutedLayer) -> tuple[Block, int]:
        """A block with a layer step in it, and its place there."""
        if self._block is not None:
            return self._block, routed.layer
        step = RoutedStep(
            step=self._step,
            phase=self._phase,
            batch=self._batch,
            tokens=len(routed.routing),
            context_tokens=0,
            sequences=0,
            layers=[routed],
        )
        return self.planner.block_of(step), 0

    def end_step(self, tokens: int, sequences: int) -> None:
        """Note that a forward pass has ended.

        What came after the last layer was its head. A copy that waits for the device's
        worker has its turn before the next pass begins.
        """
        head = self._dense_part(-1)
        self.device.step_done(self._timeline)
        waits = False
        with self.lanes.lock:
            end_s = self._goes_on_s = self._note_dense(head)
            place = self._step, self._phase, self._batch
            times_s = self._step_start_s, end_s
            self._ask(StepInfo(*place, tokens, sequences, *times_s))
            if not self._inline:
                self._device_worker.release()
                waits = not self.lanes.machine.take(self._gpu)
        if self._inline:
            self._answer()
        elif waits:
            self._device_worker.serve(lambda: True, released=True)

    def _ask(self, request: LayerJob | StepInfo) -> None:
        """Hand a request to control; with the lock held."""
        self._requests.append(request)
        if not self._inline:
            self.lanes.control.take()

    def _dense_part(self, layer: int) -> Task:
        """What the model has computed since the device's thread went on with it."""
        operation = Task(self._gpu, DENSE, self._step, layer)
        operation.start_s = self._resumed_s
        operation.end_s = self.lanes.clock_s()
        self.device.marked(operation)
        counters = self._counters()
        if counters is not None and self._resumed is not None:
            operation.counters = counters.since(self._resumed)
        # The next part begins here, unless experts come between.
        self._resumed = counters
        return operation

    def _counters(self) -> Counters | None:
        """What the system has counted of the device's thread."""
        evidence = self._device_worker.evidence
        return None if evidence is None else evidence.read()

    def _note_dense(self, operation: Task) -> float:
        """Note a dense part that ends at this instant; with the lock held."""
        instant_s = self.lanes.now_s
        # Copies that the worker had begun came first.
        freed_s = 0.0 if self._inline else self._device_worker.freed_s
        operation.picked_s = max(self._goes_on_s, freed_s)
        operation.ended_s = instant_s
        self.lanes.finished.append(operation)
        return instant_s

    # -- the control side -------------------------------------------------------------

    def _is_asked(self) -> bool:
        if self._requests:
            return True
        return self._forward is not None and self._forward.done

    def _answer(self) -> None:
        """Work through the device's requests."""
        while self._requests:
            request = self._requests.popleft()
            if isinstance(request, LayerJob):
                self._run_layer(request)
                continue
            if not self._inline:
                self.layer_step.noting(request.step, request.end_s)
            self.layer_step.take_in()
            self._timeline.step(**request._asdict())
            self._steps += 1
            self._progress(request)

    def _run_layer(self, job: LayerJob) -> None:
        """Walk one layer step; serve control's own lanes wherever it waits."""
        self.memories.job = job
        if job.block is not self.planner.block:
            self.planner.put(job.block)
        self.layer_step.answer(job.place)


def _allocate(
    planner: Planner,
    store: ExpertStore,
    device: HostDevice,
    gatings: Sequence[Callable[[torch.Tensor], torch.Tensor] | None] | None,
) -> Memories:
    """Take host memory and the device's slots, or neither."""
    shape = planner.shape
    sizes = planner.sizes
    books = planner.gpu[0]
    # What a static cache holds never leaves the device.
    keeps = isinstance(planner.policies.caches[0], Static)
    kept = frozenset(residents(books) if keeps else ())
    host = HostSlotMap(
        store,
        planner.host.memory if planner.host is not None else None,
        sizes.host,
        sizes.staging,
        shape.expert_bytes,
        page_lock=device.page_lock,
        kept=kept,
    )
    try:
        count = cache_slots(sizes.gpu, shape.expert_bytes) + sizes.staging
        # Copies back are made from a slot that nothing is copied into.
        count += planner.policies.writes_back
        slots = device.allocate(count, store.slot_bytes)
    except BaseException:
        host.close()
        raise
    written_back = brought = None
    if planner.policies.writes_back:
        written_back = HostSlots(1, store.slot_bytes, page_lock=device.page_lock)
    if kept and device.device.type != "cpu":
        brought = HostSlots(1, store.slot_bytes, page_lock=device.page_lock)
    return Memories(
        store,
        host,
        SlotMap(slots, store, books),
        device,
        gatings or [None] * store.layers,
        written_back=written_back,
        brought=brought,
    )


def _raise_failure(failure: BaseException | None) -> None:
    """Raise what a run died of; memory that ran out in the words of a user."""
    if isinstance(failure, (MemoryError, torch.OutOfMemoryError)):
        reason = (str(failure).splitlines() or ["no more memory"])[0]
        raise RuntimeFault(
            f"out of memory during the run: {reason}; ask for a smaller expert cache or"
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

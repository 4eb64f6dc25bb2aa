"""Real workers that serve lanes, one operation at a time, as a hardware profile says.

A lane is a kind of work, a worker is a thread that does it; the engine keeps the queues
(`moesim.engine.operations`).
The worker that has the `control` lane is the caller's own thread: it plans, and serves
its other lanes while it waits.

There is one lock for all queues, held for some instructions only. A worker with nothing
to do sleeps on a lock of its own, which is released when there is work for it, when
what it waits for has come, or when another worker has failed. Nothing polls. Sleepers
are woken after the common lock is free again: one that is woken while it is held would
only fall asleep at it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from moesim.base.errors import RuntimeFault
from moesim.engine.operations import Clock, machine_of
from moesim.hwprofiles.lanes import CONTROL, CPU
from moesim.runtime.measure.profile import ThreadEvidence

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from moesim.engine.operations import Operation
    from moesim.engine.operations import Worker as EngineWorker
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.runtime.measure.profile import Counters


_JOIN_S: Final = 20.0
"""How long `Lanes.close` waits for a thread that is inside an operation: a read of a
dying disk may never return.
"""


class Stopped(Exception):  # noqa: N818 - no error: another worker failed, or the caller stopped
    """The run is over."""


def _rouse(sleeper: threading.Lock) -> None:
    """Release the lock on which a worker sleeps; it may have been roused already."""
    try:  # noqa: SIM105 - as cheap as nothing where it does not fail
        sleeper.release()
    except RuntimeError:
        pass


def _nothing() -> None:
    """Do nothing."""


class WakingLock:
    """A lock that wakes sleepers when it is left, not while it is held.

    Whatever happens while it is held happens at one instant, the `now_s` of its clock.
    So the order of instants is the order of events, and a run can be replayed from
    them.

    Args:
        lanes: whose clock it sets.
    """

    __slots__ = ("_lanes", "_lock", "_sleepers")

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._lock = threading.Lock()
        self._sleepers: list[threading.Lock] = []

    def __enter__(self) -> None:
        """Wait for the lock."""
        self._lock.acquire()
        lanes = self._lanes
        lanes.now_s = time.perf_counter() - lanes.began_s

    def __exit__(self, *_: object) -> None:
        """Leave, then wake."""
        sleepers = self._sleepers
        self._sleepers = []
        self._lock.release()
        for sleeper in sleepers:
            _rouse(sleeper)

    def wake_afterwards(self, sleeper: threading.Lock) -> None:
        """Release this lock, on which a worker sleeps, when the common one is left."""
        self._sleepers.append(sleeper)


class Task:
    """What a worker really does for an operation.

    Attributes:
        lane: index of the lane.
        kind: kind of span.
        step: forward pass.
        layer: MoE layer; -1 where there is none.
        expert: expert; -1 where there is none.
        nbytes: bytes moved.
        picked_s: instant at which its worker was to do it; negative before.
        start_s: when it started, seconds since the run began; negative before.
        end_s: when it ended; negative before.
        ended_s: instant at which its consequences queued; negative before.
        work: does it; returns start and end where a device's clock knows them better,
            else None.
        counters: what the system counted of its thread meanwhile; None if nobody asked.
        operation: that it is done for; None for what no queue knows.
    """

    __slots__ = (
        "counters",
        "end_s",
        "ended_s",
        "expert",
        "kind",
        "lane",
        "layer",
        "nbytes",
        "operation",
        "picked_s",
        "start_s",
        "step",
        "work",
    )

    def __init__(
        self,
        lane: int,
        kind: int,
        step: int,
        layer: int,
        expert: int = -1,
        nbytes: int = 0,
    ) -> None:
        self.lane = lane
        self.kind = kind
        self.step = step
        self.layer = layer
        self.expert = expert
        self.nbytes = nbytes
        self.picked_s = -1.0
        self.start_s = -1.0
        self.end_s = -1.0
        self.ended_s = -1.0
        self.work: Callable[[], tuple[float, float] | None] = _nothing
        self.counters: Counters | None = None
        self.operation: Operation | None = None

    def run(self) -> tuple[float, float] | None:
        """Do it, on the worker's thread; return as `work`."""
        return self.work()

    def ended(self) -> None:
        """Let follow what no queue knows of. Called with the lock held."""


class Worker:
    """A thread that does what the machine gives one of its workers.

    Attributes:
        name: of the worker.
        lane: index of one of its lanes.
        threads: that it computes with.
        cores: that its thread is kept on; any where empty.
        freed_s: instant at which it was last free to serve.
        on_serving: called with the lock held when its thread begins to serve.
        evidence: reads what the system counts of its thread; None in runs that note no
            operations.
    """

    __slots__ = (
        "_asleep",
        "_called",
        "_lanes",
        "_next",
        "_sleeping",
        "cores",
        "evidence",
        "freed_s",
        "lane",
        "name",
        "on_serving",
        "threads",
    )

    def __init__(self, owner: Lanes, name: str, lane: int, threads: int) -> None:
        self.name = name
        self.lane = lane
        self.threads = threads
        self.freed_s = 0.0
        self.on_serving: Callable[[], object] | None = None
        self.evidence: ThreadEvidence | None = None
        self.cores: set[int] = set()
        self._lanes = owner
        self._sleeping = threading.Lock()
        self._sleeping.acquire()
        self._asleep = False
        self._called = False
        self._next: Task | None = None

    def hand(self, task: Task) -> None:
        """Give the thread, whose worker is busy from now on, something to do; with the
        lock held.
        """
        task.picked_s = self._lanes.now_s
        self._next = task
        self.wake()

    def call(self) -> None:
        """Let the thread, for which its worker was taken, look at what it waits for;
        with the lock held.
        """
        self._called = True
        self.wake()

    def take(self) -> None:
        """Take the worker from its lanes for its own thread, now or when it is free;
        with the lock held.
        """
        if self._lanes.machine.take(self.lane):
            self.call()

    def release(self) -> None:
        """Let the worker serve its lanes again; with the lock held."""
        self.freed_s = self._lanes.now_s
        self._lanes.machine.give(self.lane)

    def wake(self) -> None:
        """Let a sleeping thread look around; with the lock held."""
        if self._asleep:
            self._asleep = False
            self._lanes.lock.wake_afterwards(self._sleeping)

    def rouse(self) -> None:
        """Let a sleeping thread look around, without any lock."""
        _rouse(self._sleeping)

    def serve(self, until: Callable[[], bool], *, released: bool = False) -> None:
        """Do what comes, until the worker was taken for this thread and `until()`
        holds.

        Args:
            until: asked with the lock held.
            released: the worker serves its lanes already.

        Raises:
            Stopped: the run is over, because a worker failed or the caller closed it.
        """
        lanes = self._lanes
        # Signals are the control thread's; the others have nothing to check.
        check = lanes.interrupts.check if self is lanes.control else _nothing
        done: Task | None = None
        while True:
            check()
            with lanes.lock:
                if done is not None:
                    self._end(done)
                    done = None
                elif not released:
                    released = True
                    if self.on_serving is not None:
                        self.on_serving()
                    self.release()
                if lanes.stopping:
                    raise Stopped
                while self._called:
                    self._called = False
                    if until():
                        return
                    lanes.machine.give(self.lane)
                task = self._next
                self._next = None
                self._asleep = task is None
            if task is None:
                self._sleeping.acquire()
                continue
            self._run(task)
            done = task

    def _end(self, task: Task) -> None:
        """Let a task's consequences queue; with the lock held."""
        lanes = self._lanes
        task.ended_s = self.freed_s = lanes.now_s
        lanes.finished.append(task)
        operation = task.operation
        task.operation = None
        task.ended()
        if operation is None:
            lanes.machine.give(self.lane)
        else:
            lanes.machine.ended(operation)

    def _run(self, task: Task) -> None:
        """Do a task, and note when."""
        began_s = self._lanes.began_s
        evidence = self.evidence
        before = None if evidence is None else evidence.read()
        task.start_s = time.perf_counter() - began_s
        times = task.run()
        if times is None:
            task.end_s = time.perf_counter() - began_s
        else:
            task.start_s, task.end_s = times
        if evidence is not None and before is not None:
            task.counters = evidence.read().since(before)

    def work(self) -> None:
        """Serve on a thread of its own until the run is over; a failure ends it."""
        try:
            if self.cores:
                os.sched_setaffinity(0, self.cores)
            torch.set_num_threads(self.threads)
            if self._lanes.counts:
                self.evidence = ThreadEvidence()
            with torch.inference_mode():
                # Idle from the first instant on, however late its thread begins.
                self.serve(lambda: False, released=True)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the control thread raises it
            self._lanes.fail(error)
        finally:
            if self.evidence is not None:
                self.evidence.close()


class Lanes(Clock):
    """The real clock: all workers of one run, a thread each. Threads start with `open`
    and end with `close`.

    Args:
        profile: lanes, workers and their order.
        with_control: lane classes served by the control thread whatever the profile
            says: CUDA work is launched there, since the device, not a host core, does
            it.

    Attributes:
        lock: guards every queue, every chain of copies, and the planner's books.
        machine: the queues, and who may take from them.
        make: makes what is really done for an operation that starts.
        finished: tasks in the order they ended; the control thread takes them out.
        began_s: the monotonic clock when the run began; all times count from there.
        control: the worker of the caller's thread.
        interrupts: signals that wait until nothing is half done.
        stopping: no more work; set by a failure or by `close`.
        failure: what a worker died of.
        counts: whether workers read what the system counts of their threads.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        with_control: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.began_s = time.perf_counter()
        self.lock = WakingLock(self)
        self.make: Callable[[Operation], Task] = nothing_to_do
        self.finished: deque[Task] = deque()
        self.stopping = False
        self.counts = False
        self.failure: BaseException | None = None
        self.names = profile.lanes
        self._threads: list[threading.Thread] = []
        self._workers: list[Worker] = []
        self._worker_of: dict[int, Worker] = {}
        grouped = _grouped(profile, with_control)
        self.machine = machine_of(self.names, list(grouped.values()))
        self.machine.clock = self
        for name, lanes in grouped.items():
            indices = [self.names.index(lane) for lane in lanes]
            threads = profile.cpu_threads if CPU.lane() in lanes else 1
            worker = Worker(self, name, indices[0], threads)
            self._workers.append(worker)
            self._worker_of |= dict.fromkeys(indices, worker)
        self._thread_of = dict(zip(self.machine.workers, self._workers, strict=True))
        self.control = self._worker_of[self.names.index(CONTROL.lane())]
        self.interrupts = Interrupts(self.control.rouse)

    # -- as the machine asks, with the lock held --------------------------------------

    def start(self, operation: Operation) -> None:
        """Hand an operation that begins now to its thread."""
        task = self.make(operation)
        task.operation = operation
        self._worker_of[operation.lane].hand(task)

    def wake(self) -> None:
        """Let control, which was taken, go on with its layer step."""
        self.turns += 1
        self.control.call()

    def taken(self, worker: EngineWorker) -> None:
        """Let the thread for which a worker was taken go on."""
        self._thread_of[worker].call()

    # -- the run ----------------------------------------------------------------------

    def worker(self, lane: str) -> Worker:
        """Return who serves a lane."""
        return self._worker_of[self.names.index(lane)]

    def open(self) -> None:
        """Start the threads and the clock; control is the caller's."""
        self.began_s = time.perf_counter()
        if self.counts:
            self.control.evidence = ThreadEvidence()
        with self.lock:
            self.machine.take(self.control.lane)
        for worker in self._workers:
            if worker is not self.control:
                thread = threading.Thread(
                    target=worker.work, name=f"moesim-{worker.name}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def clock_s(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.began_s

    def fail(self, error: BaseException) -> None:
        """Note why the run cannot go on, and wake everybody."""
        with self.lock:
            self.failure = self.failure or error
            self._stop()

    def close(self) -> None:
        """End all threads; what was queued is dropped, what is being done ends first.

        Raises:
            RuntimeFault: a thread does not come back.
        """
        with self.lock:
            self._stop()
        if self.control.evidence is not None:
            self.control.evidence.close()
        until_s = time.perf_counter() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.perf_counter()))
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        self._threads.clear()
        if stuck:
            raise RuntimeFault(
                f"{', '.join(stuck)}: no answer for {_JOIN_S:.0f} s; does the disk"
                " still answer?"
            )

    def _stop(self) -> None:
        self.stopping = True
        for worker in self._workers:
            worker.wake()


def nothing_to_do(operation: Operation) -> Task:
    """Do nothing for an operation but take its place in time."""
    return Task(
        operation.lane,
        operation.kind,
        operation.step,
        operation.layer,
        operation.expert,
        operation.nbytes,
    )


def _grouped(
    profile: HardwareProfile, with_control: tuple[str, ...]
) -> dict[str, list[str]]:
    """Workers and their lanes, in the profile's order, with the lanes of some classes
    moved to the control's worker.
    """
    moved = (
        [lane for lane in profile.lanes if lane.startswith(with_control)]
        if with_control
        else []
    )
    grouped: dict[str, list[str]] = {}
    for name, lanes in profile.workers.items():
        served = [lane for lane in lanes if lane not in moved]
        if CONTROL.lane() in lanes:
            served = [*moved, *served]
        if served:
            grouped[name] = served
    return grouped


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Holds signals back within its block.

    Args:
        wake: lets the control thread call `check`; called by the signal's handler, so
            it takes no lock.
    """

    __slots__ = ("_handlers", "_noted", "_wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._noted: int | None = None
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> Self:
        """Take the place of the handlers; only the main thread has any."""
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the handlers back, and call the one that is due."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if kind is None:
            self.check()

    def check(self) -> None:
        """Call the handler of a signal that was noted. Hold no lock."""
        if self._noted is not None:
            number = self._noted
            self._noted = None
            self._handlers[number](number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None:
            self._handlers[number](number, frame)
        self._noted = number
        self._wake()

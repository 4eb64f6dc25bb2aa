"""Real workers that serve lanes, one operation at a time, as a hardware profile says.

A lane is a kind of work, a worker is a thread that does it (`moesim.engine.lanes`).
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
from moesim.engine.lanes import DEMAND, Admission, WorkerQueues, takes_places
from moesim.hwprofiles.lanes import CONTROL, CPU
from moesim.runtime.measure.profile import ThreadEvidence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FrameType

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

    Whatever happens while it is held happens at one instant. So the order of instants
    is the order of events, and a run can be replayed from them.

    Attributes:
        began_s: the monotonic clock when the run began.
        instant_s: when it was last taken, seconds since the run began.
    """

    __slots__ = ("_lock", "_sleepers", "began_s", "instant_s")

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.instant_s = 0.0
        self._lock = threading.Lock()
        self._sleepers: list[threading.Lock] = []

    def __enter__(self) -> None:
        """Wait for the lock."""
        self._lock.acquire()
        self.instant_s = time.perf_counter() - self.began_s

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


class Operation:
    """Something one lane does without interruption.

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
        counters: what the system counted of its thread meanwhile; None if nobody asked.
        on_end: called with it when it has ended, with the lock held.
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
        "on_end",
        "picked_s",
        "start_s",
        "step",
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
        self.counters: Counters | None = None
        self.on_end: Callable[..., object] | None = None

    def run(self) -> tuple[float, float] | None:
        """Do it, on the worker's thread.

        Returns:
            Start and end where a device's clock knows them better, else None.
        """
        return None

    def ended(self) -> None:
        """Let its consequences queue. Called with the lock held."""
        if self.on_end is not None:
            self.on_end(self)


class Worker(WorkerQueues[Operation]):
    """Serves the queues of its lanes in order; busy with at most one operation.

    An idle worker that is handed work has *started* it: it cannot be withdrawn any
    more, and what comes later waits behind it, as in the simulator. One that is woken
    because what it waits for has come takes no more work before it has looked.

    Attributes:
        name: of the worker.
        threads: that it computes with.
        cores: that its thread is kept on; any where empty.
        idle: it sleeps, and may be handed work.
        freed_s: instant at which it was last free to serve.
        on_serving: called with the lock held when its thread begins to serve.
        evidence: reads what the system counts of its thread; None in runs that note no
            operations.
    """

    __slots__ = (
        "_called",
        "_lanes",
        "_next",
        "_sleeping",
        "cores",
        "evidence",
        "freed_s",
        "idle",
        "name",
        "on_serving",
        "threads",
    )

    def __init__(
        self,
        owner: Lanes,
        name: str,
        lanes: Sequence[tuple[int, str]],
        admission: Admission,
        threads: int,
    ) -> None:
        super().__init__(lanes, admission)
        self.name = name
        self.threads = threads
        self.idle = False
        self.freed_s = 0.0
        self.on_serving: Callable[[], object] | None = None
        self.evidence: ThreadEvidence | None = None
        self.cores: set[int] = set()
        self._lanes = owner
        self._sleeping = threading.Lock()
        self._sleeping.acquire()
        self._called = False
        self._next: Operation | None = None

    def queue(self, operation: Operation, priority: int) -> None:
        """Append to one of this worker's queues; with the lock held."""
        self.push(operation, priority)
        self.offer()

    def offer(self) -> None:
        """Give an idle worker the next operation that may start; with the lock held."""
        if not self.idle or self._called:
            return
        operation = self._picked()
        if operation is not None:
            self._next = operation
            self.wake()

    def release(self, *, idle: bool) -> bool:
        """Let go of what the thread did beside serving; with the lock held.

        Args:
            idle: the thread is about to serve, and may be handed work from now on.

        Returns:
            Whether an operation waits to be served.
        """
        self.freed_s = self._lanes.lock.instant_s
        self._next = self._picked()
        # Nobody wakes an idle worker once the run is over.
        if self._next is None and idle and not self._lanes.stopping:
            self.idle = True
            self._called = False
        return self._next is not None

    def _picked(self) -> Operation | None:
        # A copy that takes its place may queue others here: one is picked at a time.
        idle = self.idle
        self.idle = False
        operation = self.pick()
        self.idle = idle
        if operation is not None:
            operation.picked_s = self._lanes.lock.instant_s
        return operation

    def wake(self) -> None:
        """Let a waiting worker look again at what it waits for; with the lock held."""
        if self.idle and not self._called:
            self._called = True
            self._lanes.lock.wake_afterwards(self._sleeping)

    def rouse(self) -> None:
        """Let a sleeping worker look around, without any lock."""
        _rouse(self._sleeping)

    def serve(self, until: Callable[[], bool]) -> None:
        """Do what comes, until `until()` holds and nothing has been started.

        Args:
            until: asked with the lock held.

        Raises:
            Stopped: the run is over, because a worker failed or the caller closed it.
        """
        lanes = self._lanes
        # Signals are the control thread's; the others have nothing to check.
        check = lanes.interrupts.check if self is lanes.control else _nothing
        done: Operation | None = None
        begins = not self.idle
        if self.idle:
            # Released before: it may have been handed work already.
            self._sleeping.acquire()
        while True:
            check()
            with lanes.lock:
                if done is not None:
                    self._end(done)
                elif begins:
                    self._begin()
                begins = False
                done = None
                self.idle = False
                if lanes.stopping:
                    raise Stopped
                operation = self._next
                self._next = None
                if operation is None:
                    if until():
                        return
                    operation = self._picked()
                if operation is None:
                    self.idle = True
                    self._called = False
            if operation is None:
                self._sleeping.acquire()
                continue
            self._run(operation)
            done = operation

    def _begin(self) -> None:
        """Note that the thread serves from now on; with the lock held."""
        if self._next is not None:
            return
        self.freed_s = self._lanes.lock.instant_s
        if self.on_serving is not None:
            self.on_serving()

    def _end(self, operation: Operation) -> None:
        """Let an operation's consequences queue; with the lock held."""
        operation.ended_s = self.freed_s = self._lanes.lock.instant_s
        self._lanes.finished.append(operation)
        operation.ended()

    def _run(self, operation: Operation) -> None:
        """Do an operation, and note when."""
        began_s = self._lanes.began_s
        evidence = self.evidence
        before = None if evidence is None else evidence.read()
        operation.start_s = time.perf_counter() - began_s
        times = operation.run()
        if times is None:
            operation.end_s = time.perf_counter() - began_s
        else:
            operation.start_s, operation.end_s = times
        if evidence is not None and before is not None:
            operation.counters = evidence.read().since(before)

    def work(self) -> None:
        """Serve on a thread of its own until the run is over; a failure ends it."""
        try:
            if self.cores:
                os.sched_setaffinity(0, self.cores)
            torch.set_num_threads(self.threads)
            if self._lanes.counts:
                self.evidence = ThreadEvidence()
            with torch.inference_mode():
                self.serve(lambda: False)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the control thread raises it
            self._lanes.fail(error)
        finally:
            if self.evidence is not None:
                self.evidence.close()


class Lanes:
    """All workers of one run. Threads start with `open` and end with `close`.

    Args:
        profile: lanes, workers and their order.
        with_control: lane classes served by the control thread whatever the profile
            says: CUDA work is launched there, since the device, not a host core, does
            it.

    Attributes:
        lock: guards every queue, every chain of copies, and the planner's books.
        admission: gate of the lanes that bring experts into a memory.
        finished: operations in the order they ended; the control thread takes them out.
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
        self.lock = WakingLock()
        self.admission = Admission()
        self.finished: deque[Operation] = deque()
        self.began_s = time.perf_counter()
        self.stopping = False
        self.counts = False
        self.failure: BaseException | None = None
        self.names = profile.lanes
        self._worker_of: dict[int, Worker] = {}
        self._threads: list[threading.Thread] = []
        self._workers: list[Worker] = []
        for name, lanes in _grouped(profile, with_control).items():
            worker = Worker(
                self,
                name,
                [(self.names.index(lane), lane) for lane in lanes],
                self.admission,
                profile.cpu_threads if CPU.lane() in lanes else 1,
            )
            self._workers.append(worker)
            for lane in lanes:
                self._worker_of[self.names.index(lane)] = worker
        gated = [self.worker(lane) for lane in self.names if takes_places(lane)]
        self._gated = list(dict.fromkeys(gated))
        self.control = self._worker_of[self.names.index(CONTROL.lane())]
        self.interrupts = Interrupts(self.control.rouse)

    def worker(self, lane: str) -> Worker:
        """Return who serves a lane."""
        return self._worker_of[self.names.index(lane)]

    def open(self) -> None:
        """Start the threads and the clock."""
        self.began_s = self.lock.began_s = time.perf_counter()
        if self.counts:
            self.control.evidence = ThreadEvidence()
        for worker in self._workers:
            if worker is not self.control:
                # Idle from the first instant on, however late its thread begins.
                with self.lock:
                    worker.release(idle=True)
                thread = threading.Thread(
                    target=worker.work, name=f"moesim-{worker.name}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def clock_s(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.began_s

    def post(self, operations: Iterable[tuple[Operation, int]]) -> None:
        """Queue operations with their priorities: one hand-off for all of them."""
        with self.lock:
            for operation, priority in operations:
                self.submit(operation, priority)

    def submit(self, operation: Operation, priority: int = DEMAND) -> None:
        """Queue one operation; with the lock held."""
        self._worker_of[operation.lane].queue(operation, priority)

    def withdraw(self, operation: Operation, priority: int) -> None:
        """Take back an operation that has not started; with the lock held."""
        self._worker_of[operation.lane].withdraw(operation, priority)

    def offer(self) -> None:
        """Let idle workers look again at what waited for a place.

        With the lock held.
        """
        for worker in self._gated:
            worker.offer()

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

"""Real workers that serve lanes, one operation at a time, as a hardware profile says.

The workshop of `sim/machine.py`, with people in it. A lane is a kind of work, a worker
is a thread that does it; lanes that share a worker take turns in the profile's order,
and inside a lane demand goes before prefetches and those before replacements. Nothing
is preempted. The worker that has the `control` lane is the caller's own thread: it
plans, and serves its other lanes while it waits.

There is one lock for all queues, held for some instructions only, and one bell per
worker. Whoever waits, waits for its own bell, which is rung when there is work for it,
when what it waits for has come, or when another worker has failed. Nothing polls and
nothing sleeps for a while to look again. Bells ring after the lock is free again: a
worker that is woken while it is held would only fall asleep at the lock.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

import torch
from moesim.runtime.errors import RuntimeFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from moesim.hwprofiles.profile import HardwareProfile

DEMAND = 0
AHEAD = 1
REPLACING = 2
"""Priorities inside a lane, as in the simulator."""

_JOIN_S: Final = 20.0
"""How long `Lanes.close` waits for a thread that is inside an operation: a read of a
dying disk may never return.
"""


class Stopped(Exception):  # noqa: N818 - not an error: somebody else has failed, or the run was interrupted
    """The run is over; whoever meets this goes home."""


class Guard:
    """A lock that rings, when it is left, the bells that were asked for while it was
    held.
    """

    __slots__ = ("_bells", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bells: list[threading.Lock] = []

    def __enter__(self) -> None:
        """Wait for the lock."""
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Leave, then ring."""
        bells = self._bells
        self._bells = []
        self._lock.release()
        for bell in bells:
            bell.release()

    def ring(self, bell: threading.Lock) -> None:
        """Ring this bell when the lock is left."""
        self._bells.append(bell)


class Gate(Protocol):
    """What an operation with `staged` set must win before it starts. Called with the
    lock held.
    """

    def admit(self, operation: Operation) -> bool:
        """Take a place for it, if there is one."""


class Operation:
    """Something one lane does without interruption.

    Attributes:
        lane: index of the lane.
        kind: kind of span.
        step: forward pass; layer, expert: -1 where there is none.
        nbytes: bytes moved.
        staged: needs a place behind the lane's gate before it starts.
        start_s: when it started, seconds since the run began; negative before.
        end_s: when it ended; negative before.
    """

    __slots__ = (
        "end_s",
        "expert",
        "kind",
        "lane",
        "layer",
        "nbytes",
        "staged",
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
        self.staged = False
        self.start_s = self.end_s = -1.0

    def run(self) -> tuple[float, float] | None:
        """Do it, on the worker's thread; return start and end where a device's clock
        knows them better.
        """
        return None

    def ended(self) -> None:
        """Let its consequences queue. Called with the lock held."""


class Worker:
    """Serves the queues of its lanes in order; busy with at most one operation.

    An idle worker that is handed work has *started* it: it cannot be withdrawn any
    more, and what comes later waits behind it, just as in the simulator.
    """

    __slots__ = (
        "_bell",
        "_called",
        "_lanes",
        "_next",
        "_queues",
        "_waiting",
        "cores",
        "idle",
        "name",
        "threads",
    )

    def __init__(
        self,
        lanes: Lanes,
        name: str,
        queues: list[tuple[deque[Operation], Gate | None]],
        threads: int,
    ) -> None:
        self.name = name
        self.idle = False
        self.cores: set[int] = set()
        self._lanes = lanes
        self._queues = queues
        self.threads = threads
        self._bell = threading.Lock()
        self._bell.acquire()
        self._called = False
        self._next: Operation | None = None
        self._waiting = 0

    def queue(self, operation: Operation, queue: deque[Operation]) -> None:
        """Append to one of this worker's queues; with the lock held."""
        queue.append(operation)
        self._waiting += 1
        self.offer()

    def offer(self) -> None:
        """Give an idle worker the next operation that may start; with the lock held."""
        if self.idle and self._next is None and (found := self._pick()) is not None:
            self._next = found
            self.wake()

    def withdrawn(self) -> None:
        """Note that one queued operation was taken back; with the lock held."""
        self._waiting -= 1

    def wake(self) -> None:
        """Let a waiting worker look again at what it waits for; with the lock held."""
        if self.idle and not self._called:
            self._called = True
            self._lanes.lock.ring(self._bell)

    def serve(self, until: Callable[[], bool]) -> None:
        """Do what comes, until `until()` holds (asked with the lock held) and nothing
        has been started.

        Raises:
            Stopped: the run is over, because a worker failed or the caller closed it.
        """
        lanes = self._lanes
        clock = time.perf_counter
        began_s = self._lanes.began_s
        lock = lanes.lock
        finished = lanes.finished
        done: Operation | None = None
        while True:
            with lock:
                if done is not None:
                    finished.append(done)
                    done.ended()
                    done = None
                self.idle = False
                if lanes.stopping:
                    raise Stopped
                operation = self._next
                self._next = None
                if operation is None:
                    if until():
                        return
                    operation = self._pick()
                if operation is None:
                    self.idle = True
                    self._called = False
            if operation is None:
                self._bell.acquire()
                continue
            start_s = clock() - began_s
            operation.start_s = start_s
            times = operation.run()
            if times is None:
                operation.end_s = clock() - began_s
            else:
                operation.start_s, operation.end_s = times
            done = operation

    def work(self) -> None:
        """Serve on a thread of its own until the run is over; a failure is
        everybody's.
        """
        try:
            if self.cores:
                os.sched_setaffinity(0, self.cores)
            torch.set_num_threads(self.threads)
            with torch.inference_mode():
                self.serve(lambda: False)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the control thread, which raises it
            self._lanes.fail(error)

    def _pick(self) -> Operation | None:
        """Take the first operation that may start from the queues."""
        if not self._waiting:
            return None
        for queue, gate in self._queues:
            if not queue or (
                gate is not None and queue[0].staged and not gate.admit(queue[0])
            ):
                continue
            self._waiting -= 1
            return queue.popleft()
        return None


class Lanes:
    """All workers of one run. Threads start with `open` and end with `close`.

    Args:
        profile: lanes, workers and their order.
        gates: lane name -> gate of its demand queue (of all its queues for ``ssd``), as
            in the simulator.
        with_control: lane classes served by the control thread whatever the profile
            says: CUDA work is launched there, since the device, not a host core, does
            it.

    Attributes:
        lock: guards every queue, gate and chain.
        finished: operations in the order they ended; the control thread takes them out.
        began_s: the monotonic clock when the run began; all times count from there.
        control: the worker of the caller's thread.
        stopping: no more work; set by a failure or by `close`.
        failure: what a worker died of.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        gates: Mapping[str, Gate] | None = None,
        with_control: tuple[str, ...] = (),
    ) -> None:
        self.lock = Guard()
        self.finished: deque[Operation] = deque()
        self.began_s = time.perf_counter()
        self.stopping = False
        self.failure: BaseException | None = None
        self.names = profile.lanes
        self._queue: list[list[deque[Operation]]] = [[] for _ in self.names]
        self._worker_of: dict[int, Worker] = {}
        self._threads: list[threading.Thread] = []
        self._workers: list[Worker] = []
        for name, lanes in _grouped(profile, with_control).items():
            queues: list[tuple[deque[Operation], Gate | None]] = []
            for lane in lanes:
                index = self.names.index(lane)
                for priority in (DEMAND, AHEAD, REPLACING):
                    queue: deque[Operation] = deque()
                    self._queue[index].append(queue)
                    gate = (gates or {}).get(lane)
                    queues.append(
                        (queue, gate if priority == DEMAND or lane == "ssd" else None)
                    )
            worker = Worker(
                self, name, queues, profile.cpu_threads if "cpu" in lanes else 1
            )
            self._workers.append(worker)
            for lane in lanes:
                self._worker_of[self.names.index(lane)] = worker
        self.control = self._worker_of[self.names.index("control")]

    def worker(self, lane: str) -> Worker:
        """Return who serves a lane."""
        return self._worker_of[self.names.index(lane)]

    def open(self) -> None:
        """Start the threads and the clock."""
        self.began_s = time.perf_counter()
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

    def post(self, operations: Iterable[tuple[Operation, int]]) -> None:
        """Queue operations with their priorities: one hand-off for all of them."""
        with self.lock:
            for operation, priority in operations:
                self.submit(operation, priority)

    def submit(self, operation: Operation, priority: int = DEMAND) -> None:
        """Queue one operation; with the lock held."""
        self._worker_of[operation.lane].queue(
            operation, self._queue[operation.lane][priority]
        )

    def withdraw(self, operation: Operation, priority: int) -> bool:
        """Take back an operation that has not started; False if it has. With the lock
        held.
        """
        try:
            self._queue[operation.lane][priority].remove(operation)
        except ValueError:
            return False
        self._worker_of[operation.lane].withdrawn()
        return True

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
        own = [lane for lane in lanes if lane not in moved]
        if "control" in lanes:
            own = [*moved, *own]
        if own:
            grouped[name] = own
    return grouped

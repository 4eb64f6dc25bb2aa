"""The machine: workers that serve lanes, one operation at a time, as a hardware profile
says.

A lane is a kind of work (GPU compute, host-to-GPU copies, …); a worker is who does it.
Where lanes share a worker, they take turns in the profile's order. Inside a lane,
demand goes before prefetches, prefetches before replacements, and otherwise first come,
first served. Nothing is preempted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from moesim.sim.contention import Contention, Operation, Slots
from moesim.traces.timeline.spans import pack_span

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.sim.noise import Noise
    from moesim.traces.timeline.spans import Timeline
    from simpy.core import Environment

DEMAND = 0
AHEAD = 1
REPLACING = 2
"""Priorities inside a lane."""


class Worker:
    """Serves the queues of its lanes in order; busy with at most one operation.

    `lines`: every queue, first served first, with the slots that its staged operations
    need.
    """

    __slots__ = ("_start", "busy", "lines", "waiting")

    def __init__(self, start: Callable[[Operation], None]) -> None:
        self._start = start
        self.busy = False
        self.waiting = 0
        self.lines: list[tuple[deque[Operation], Slots | None]] = []

    def serve(self) -> None:
        """Start the next operation that may start, if idle."""
        if self.busy or not self.waiting:
            return
        for queue, gate in self.lines:
            if not queue:
                continue
            if gate is not None and queue[0].staged:
                if gate.free < 1:
                    continue
                gate.free -= 1
            self.busy = True
            self.waiting -= 1
            self._start(queue.popleft())
            return


class Machine:
    """Lanes of one hardware profile in virtual time; every finished operation becomes a
    span.
    """

    def __init__(
        self,
        env: Environment,
        profile: HardwareProfile,
        timeline: Timeline,
        noise: Noise | None = None,
    ) -> None:
        self.lanes = profile.lanes
        classes = [lane.rstrip("0123456789") for lane in self.lanes]
        self.contention = Contention(
            env, classes, profile.contention.slowdown, self._finished
        )
        self._record = timeline.spans.extend
        self._noise = noise
        self._start = self.contention.start if noise is None else self._start_scattered
        self._worker_of: list[Worker] = [Worker(self._start)] * len(self.lanes)
        self._queue: list[list[deque[Operation]]] = [[] for _ in self.lanes]
        self.staging = [
            Slots(self.lanes.index(f"h2d{gpu}")) for gpu in range(profile.gpus)
        ]
        self.host_staging = Slots(
            self.lanes.index("ssd") if "ssd" in self.lanes else -1
        )
        for lanes in profile.workers.values():
            worker = Worker(self._start)
            for name in lanes:
                index = self.lanes.index(name)
                self._worker_of[index] = worker
                for priority in (DEMAND, AHEAD, REPLACING):
                    queue: deque[Operation] = deque()
                    self._queue[index].append(queue)
                    worker.lines.append((queue, self._gate(name, priority)))

    def _gate(self, lane: str, priority: int) -> Slots | None:
        if lane.startswith("h2d") and priority == DEMAND:
            return self.staging[int(lane[3:])]
        return self.host_staging if lane == "ssd" else None

    def submit(self, operation: Operation, priority: int = DEMAND) -> None:
        """Queue an operation; it starts at once if its worker is idle."""
        worker = self._worker_of[operation.lane]
        if not worker.busy and not worker.waiting and not operation.staged:
            worker.busy = True
            self._start(operation)
            return
        self._queue[operation.lane][priority].append(operation)
        worker.waiting += 1
        if not worker.busy:
            worker.serve()

    def withdraw(self, operation: Operation, priority: int) -> bool:
        """Take back an operation that has not started; False if it has."""
        try:
            self._queue[operation.lane][priority].remove(operation)
        except ValueError:
            return False
        self._worker_of[operation.lane].waiting -= 1
        return True

    def _start_scattered(self, operation: Operation) -> None:
        assert self._noise is not None
        self._noise.scatter(operation)
        self.contention.start(operation)

    def _finished(self, operation: Operation) -> None:
        """Record the span, let the operation's consequences queue, then let its worker
        go on.
        """
        lane = operation.lane
        self._record(
            pack_span(
                lane,
                operation.kind,
                operation.step,
                operation.layer,
                operation.expert,
                operation.start_s,
                operation.end_s,
                operation.nbytes,
            )
        )
        worker = self._worker_of[lane]
        worker.busy = False
        if operation.frees is not None:
            operation.frees.free += 1
            self._worker_of[operation.frees.lane].serve()
        if operation.on_end is not None:
            operation.on_end(operation)
        if worker.waiting:
            worker.serve()

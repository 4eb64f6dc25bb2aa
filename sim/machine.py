"""The machine: workers that serve lanes, one operation at a time, as a hardware profile
says.

A lane is a kind of work (GPU compute, host-to-GPU copies, …); a worker is who does it.
Where lanes share a worker, they take turns in the profile's order. Inside a lane,
demand goes before prefetches, prefetches before replacements, and otherwise first come,
first served. Nothing is preempted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from moesim.engine.lanes import DEMAND, Admission, WorkerQueues, takes_places
from moesim.hwprofiles.lanes import kind_of
from moesim.sim.clock import Contention, Operation
from moesim.traces.timeline.spans import JOIN, pack_span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.sim.clock import Clock
    from moesim.traces.timeline.spans import Timeline


class Durations(Protocol):
    """Changes how long operations take."""

    def scatter(self, operation: Operation) -> None:
        """Set the work of an operation that starts now."""


class Measurements(Durations, Protocol):
    """Knows how long operations of a real run took."""

    def has(self, operation: Operation) -> bool:
        """Whether the run had this operation."""


class Worker(WorkerQueues[Operation]):
    """Serves the queues of its lanes in order; busy with at most one operation.

    Attributes:
        busy: with an operation, or taken by whoever needs its thread.
        kept: stays taken after the operation that ends.
        takers: called, one at a time, when the worker is free; they go first.
    """

    __slots__ = ("busy", "kept", "takers")

    def __init__(self, lanes: Sequence[tuple[int, str]], admission: Admission) -> None:
        super().__init__(lanes, admission)
        self.busy = False
        self.kept = False
        self.takers: deque[Callable[[], object]] = deque()


class Machine:
    """Lanes of one hardware profile in virtual time; every finished operation becomes a
    span.
    """

    def __init__(
        self,
        clock: Clock,
        profile: HardwareProfile,
        timeline: Timeline,
        noise: Durations | None = None,
    ) -> None:
        self.lanes = profile.lanes
        kinds = [kind_of(lane).name for lane in self.lanes]
        self.contention = Contention(
            clock, kinds, profile.contention.slowdown, self._finished
        )
        self._record = timeline.spans.extend
        self._noise = noise
        self.start = self.contention.start if noise is None else self._start_scattered
        """Start an operation on a worker that was taken; its end gives it back."""
        self.admission = Admission()
        self._gated = [takes_places(name) for name in self.lanes]
        by_lane: dict[int, Worker] = {}
        for names in profile.workers.values():
            lanes = [(self.lanes.index(name), name) for name in names]
            worker = Worker(lanes, self.admission)
            by_lane |= dict.fromkeys((index for index, _ in lanes), worker)
        self._worker_of = [by_lane[index] for index in range(len(self.lanes))]
        gated = [worker for index, worker in by_lane.items() if self._gated[index]]
        self._gated_workers = list(dict.fromkeys(gated))

    def take(self, lane: int, then: Callable[[], object]) -> None:
        """Take a lane's worker as soon as it is free, and call `then`.

        It serves nothing until it is given back.
        """
        worker = self._worker_of[lane]
        if worker.busy:
            worker.takers.append(then)
        else:
            worker.busy = True
            then()

    def take_if_free(self, lane: int) -> bool:
        """Take a lane's worker if it does nothing; whether it did."""
        worker = self._worker_of[lane]
        if worker.busy:
            return False
        worker.busy = True
        return True

    def give(self, lane: int) -> None:
        """Give a lane's worker back, to who waits for it or to its lanes."""
        self._go_on(self._worker_of[lane])

    def keep(self, operation: Operation) -> None:
        """Keep the worker of an operation that ends at this moment."""
        self._worker_of[operation.lane].kept = True

    def shares_worker(self, lane: int, other: int) -> bool:
        """Whether two lanes have the same worker."""
        return self._worker_of[lane] is self._worker_of[other]

    def submit(self, operation: Operation, priority: int = DEMAND) -> None:
        """Queue an operation; it starts at once if its worker is idle."""
        lane = operation.lane
        worker = self._worker_of[lane]
        if worker.busy:
            worker.push(operation, priority)
        elif self._gated[lane]:
            worker.push(operation, priority)
            if not self.admission.closed:
                self._serve(worker)
        elif worker.waiting:
            worker.push(operation, priority)
            self._serve(worker)
        else:
            worker.busy = True
            self.start(operation)

    def offer(self) -> None:
        """Let idle workers look again at operations that waited for a place."""
        for worker in self._gated_workers:
            if worker.waiting and not worker.busy:
                self._serve(worker)

    def withdraw(self, operation: Operation, priority: int) -> None:
        """Take back an operation that has not started."""
        self._worker_of[operation.lane].withdraw(operation, priority)

    def _serve(self, worker: Worker) -> None:
        """Start the next operation that an idle worker may start."""
        # A copy that takes its place may queue others here: one is picked at a time.
        worker.busy = True
        self._go_on(worker)

    def _start_scattered(self, operation: Operation) -> None:
        assert self._noise is not None
        self._noise.scatter(operation)
        self.contention.start(operation)

    def _finished(self, operation: Operation) -> None:
        """Record the span, let the operation's consequences queue, then let its worker
        go on.
        """
        lane = operation.lane
        # What control does between its spans is none.
        if operation.kind <= JOIN:
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
        # Busy until all consequences are queued: it chooses among all of them.
        if operation.on_end is not None:
            operation.on_end(operation)
        if worker.kept:
            worker.kept = False
        elif worker.waiting or worker.takers:
            self._go_on(worker)
        else:
            worker.busy = False

    def _go_on(self, worker: Worker) -> None:
        """Let a worker that has ended something do what comes next."""
        if worker.takers:
            worker.takers.popleft()()
            return
        operation = worker.pick()
        if operation is None:
            worker.busy = False
        else:
            self.start(operation)

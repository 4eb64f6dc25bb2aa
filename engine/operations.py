"""Operations, the queues they wait in, and the workers that serve them.

A lane is a kind of work (GPU products, copies to a GPU, reads); a worker is who does
it. Lanes that share a worker take turns in the profile's order. Inside a lane demand
goes before prefetches and these before replacements; otherwise first come, first
served. Nothing is preempted. A clock says how long operations take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.engine.names import BEHIND_DEMAND, DEMAND, DROP, WAIT
from moesim.hwprofiles import lanes
from moesim.policies.names import NONE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Operation:
    """A product, a copy, a read, a plan: one lane, from start to end.

    Attributes:
        lane, kind, step, layer, expert, nbytes: as its span has them.
        work_s: seconds that it takes alone.
        follows: what its end lets happen (`moesim.engine.names`).
        priority: in its queue.
        behind_read: a copy that waits for its expert to be in host memory.
        start_s, end_s: when it started, and when it is expected to end.
        left_s, rate, settled_s, order: the clock's own.
        next, previous: neighbours in a queue.
    """

    def __init__(self) -> None:
        self.lane = self.kind = self.step = self.layer = self.expert = 0
        self.follows = self.priority = 0
        self.behind_read = False
        self.nbytes = self.order = 0
        self.work_s = self.start_s = self.end_s = 0.0
        self.left_s = self.rate = self.settled_s = 0.0
        self.next: Operation | None = None
        self.previous: Operation | None = None


class Queue:
    """Operations of one lane and priority, first come, first served."""

    def __init__(self) -> None:
        self.first: Operation | None = None
        self.last: Operation | None = None

    def push(self, operation: Operation) -> None:
        """Append."""
        operation.previous = self.last
        operation.next = None
        if self.last is None:
            self.first = operation
        else:
            self.last.next = operation
        self.last = operation

    def remove(self, operation: Operation) -> None:
        """Take one out, wherever it stands."""
        before = operation.previous
        after = operation.next
        if before is None:
            self.first = after
        else:
            before.next = after
        if after is None:
            self.last = before
        else:
            after.previous = before
        operation.next = None
        operation.previous = None


class Lane:
    """A kind of work.

    Attributes:
        worker: who serves it.
        gpu: whose it is; -1 where it is no GPU's.
        gated: its operations need a place where they go.
    """

    def __init__(self, gpu: int, gated: bool) -> None:
        self.gpu = gpu
        self.gated = gated
        self.worker: Worker | None = None
        self.demand = Queue()
        self.prefetches = Queue()
        self.replacements = Queue()

    def queue(self, priority: int) -> Queue:
        """The queue of a priority."""
        if priority == DEMAND:
            return self.demand
        if priority == BEHIND_DEMAND:
            return self.prefetches
        return self.replacements


class Worker:
    """Serves lanes in order; busy with at most one operation.

    Attributes:
        kept: stays taken after the operation that ends.
        takes: the layer step takes it as soon as it is free.
        waiting: operations in its lanes' queues.
    """

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.busy = self.kept = self.takes = self.gated = False
        self.waiting = 0


class Gate:
    """Says whether an operation at the head of its queue may start."""

    def admit(self, operation: Operation) -> int:
        """START (it has taken its place), WAIT or DROP."""
        raise NotImplementedError


class Consequences:
    """Knows what follows the end of operations."""

    def follow(self, operation: Operation) -> None:
        """Let happen what follows."""
        raise NotImplementedError


class Clock:
    """Spends the time of operations, and wakes the process that walks layer steps.

    Attributes:
        now_s: seconds since the run began.
        turns: how often the process was woken.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = 0

    def start(self, operation: Operation) -> None:
        """Begin an operation now; `Machine.ended` is called when its work is done."""
        raise NotImplementedError

    def wake(self) -> None:
        """Give the process its turn when all that happens now has happened."""
        raise NotImplementedError

    def taken(self, worker: Worker) -> None:  # noqa: ARG002 - real clocks have several
        """Note that a worker is free at last, and taken by who has waited for it."""
        self.wake()


class Machine:
    """Lanes and workers, whoever spends the time.

    Attributes:
        closed: no gated operation may start, as decisions are under way.
        clock, gate, consequences: set by who builds the run.
    """

    def __init__(self, lanes: list[Lane], workers: list[Worker]) -> None:
        self.lanes = lanes
        self.workers = workers
        self.closed = False
        self.clock: Clock | None = None
        self.gate: Gate | None = None
        self.consequences: Consequences | None = None
        self._free: Operation | None = None

    def operation(
        self,
        lane: int,
        kind: int,
        step: int,
        layer: int,
        expert: int,
        work_s: float,
        nbytes: int,
        follows: int,
    ) -> Operation:
        """Make an operation."""
        made = self._free
        if made is None:
            made = Operation()
        else:
            self._free = made.next
            made.next = None
        made.lane = lane
        made.kind = kind
        made.step = step
        made.layer = layer
        made.expert = expert
        made.work_s = work_s
        made.nbytes = nbytes
        made.follows = follows
        made.priority = DEMAND
        made.behind_read = False
        return made

    def forget(self, operation: Operation) -> None:
        """Let another operation be made of this one."""
        operation.next = self._free
        self._free = operation

    def submit(self, operation: Operation, priority: int) -> None:
        """Queue an operation; it starts at once if its worker is idle."""
        lane = self.lanes[operation.lane]
        worker = lane.worker
        if not worker.busy and not worker.waiting and not lane.gated:
            worker.busy = True
            self.clock.start(operation)
            return
        lane.queue(priority).push(operation)
        worker.waiting += 1
        if not worker.busy:
            self._serve(worker)

    def withdraw(self, operation: Operation, priority: int) -> None:
        """Take back an operation that has not started."""
        lane = self.lanes[operation.lane]
        lane.queue(priority).remove(operation)
        lane.worker.waiting -= 1

    def offer(self) -> None:
        """Let idle workers look again at operations that waited for a place."""
        for worker in self.workers:
            if worker.gated and worker.waiting and not worker.busy:
                self._serve(worker)

    def take(self, lane: int) -> bool:
        """Take a lane's worker, or have it taken once it is free; whether it was."""
        named = self.lanes[lane]
        worker = named.worker
        if worker.busy:
            worker.takes = True
            return False
        worker.busy = True
        return True

    def shares(self, lane: int, other: int) -> bool:
        """Whether two lanes have the same worker."""
        first = self.lanes[lane]
        second = self.lanes[other]
        return first.worker is second.worker

    def give(self, lane: int) -> None:
        """Give a lane's worker back."""
        named = self.lanes[lane]
        self._go_on(named.worker)

    def ended(self, operation: Operation) -> None:
        """Let an operation's consequences queue, then its worker go on."""
        lane = self.lanes[operation.lane]
        worker = lane.worker
        # Busy until all consequences are queued: it chooses among all of them.
        self.consequences.follow(operation)
        self.forget(operation)
        if worker.kept:
            worker.kept = False
        else:
            self._go_on(worker)

    def _go_on(self, worker: Worker) -> None:
        if worker.takes:
            worker.takes = False
            self.clock.taken(worker)
            return
        worker.busy = False
        if worker.waiting:
            self._serve(worker)

    def _serve(self, worker: Worker) -> None:
        # A copy that takes its place may queue others here: one is picked at a time.
        worker.busy = True
        operation = self._pick(worker)
        if operation is None:
            worker.busy = False
        else:
            self.clock.start(operation)

    def _pick(self, worker: Worker) -> Operation | None:
        """Take out the first operation that may start now."""
        for lane in worker.lanes:
            for priority in range(3):
                queue = lane.queue(priority)
                while queue.first is not None:
                    operation = queue.first
                    verdict = 0
                    if lane.gated:
                        if self.closed:
                            break
                        verdict = self.gate.admit(operation)
                        # One that waits keeps those behind it waiting.
                        if verdict == WAIT:
                            break
                    queue.remove(operation)
                    worker.waiting -= 1
                    if verdict != DROP:
                        return operation
                    self.forget(operation)
        return None


def machine_of(names: Sequence[str], served: Iterable[Sequence[str]]) -> Machine:
    """Lanes by their names, and workers by the names of the lanes that they serve."""
    made = []
    for name in names:
        kind = lanes.kind_of(name)
        gpu = lanes.gpu_of(name) if kind.per_gpu else NONE
        made.append(Lane(gpu, kind.fills_memory))
    workers = []
    for in_turn in served:
        worker = Worker()
        worker.lanes = [made[names.index(name)] for name in in_turn]
        for lane in worker.lanes:
            lane.worker = worker
            worker.gated = worker.gated or lane.gated
        workers.append(worker)
    return Machine(made, workers)

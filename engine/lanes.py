"""Lanes and workers: who does an operation, and in which order.

A lane is a kind of work (GPU products, copies to a GPU, reads); a worker is who does
it. Lanes that share a worker take turns in the profile's order. Inside a lane demand
goes before prefetches and these before replacements; otherwise first come, first
served. Both clocks keep their queues here and differ only in how a worker works.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from moesim.engine.operations import PRIORITIES, Operation
from moesim.hwprofiles.lanes import gpu_of, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Op = TypeVar("Op", bound=Operation)

START: Final = 0
WAIT: Final = 1
DROP: Final = 2
"""What an admission gate may say to an operation at the head of its queue."""


class Admission:
    """The gate that copies and reads pass when they could start.

    They need a place where they go; `decide` takes one, or says that there is none.

    Attributes:
        closed: nothing may start, as decisions are under way.
        decide: says what an operation may do.
    """

    __slots__ = ("closed", "decide")

    def __init__(self) -> None:
        self.closed = False
        self.decide: Callable[[Any], int] = lambda _: START


def takes_places(lane: str) -> bool:
    """Whether a lane brings experts into a memory."""
    return kind_of(lane).fills_memory


class WorkerQueues(Generic[Op]):
    """Queues of the lanes that one worker serves, first served first.

    Attributes:
        waiting: operations in all queues.
    """

    __slots__ = ("_lines", "_queue_of", "waiting")

    def __init__(self, lanes: Sequence[tuple[int, str]], admission: Admission) -> None:
        """Make empty queues.

        Args:
            lanes: index and name of each lane, in the order in which they take turns.
            admission: gate of the lanes that bring experts into a memory.
        """
        self.waiting = 0
        self._queue_of: dict[int, list[deque[Op]]] = {}
        self._lines: list[tuple[deque[Op], Admission | None]] = []
        for index, name in lanes:
            gate = admission if takes_places(name) else None
            self._queue_of[index] = []
            for _ in PRIORITIES:
                queue: deque[Op] = deque()
                self._queue_of[index].append(queue)
                self._lines.append((queue, gate))

    def push(self, operation: Op, priority: int) -> None:
        """Append an operation to its lane's queue."""
        self._queue_of[operation.lane][priority].append(operation)
        self.waiting += 1

    def withdraw(self, operation: Op, priority: int) -> None:
        """Take back an operation that has not started.

        Raises:
            ValueError: it is not in that queue.
        """
        self._queue_of[operation.lane][priority].remove(operation)
        self.waiting -= 1

    def pick(self) -> Op | None:
        """Take out the first operation that may start now."""
        if not self.waiting:
            return None
        for queue, gate in self._lines:
            if gate is None:
                if queue:
                    self.waiting -= 1
                    return queue.popleft()
                continue
            while queue and not gate.closed:
                verdict = gate.decide(queue[0])
                # One that waits keeps those behind it waiting, but not the others.
                if verdict == WAIT:
                    break
                self.waiting -= 1
                operation = queue.popleft()
                if verdict != DROP:
                    return operation
        return None


def gpu_of_lane(lane: str) -> int:
    """GPU of a lane that belongs to one (``gpu1``, ``h2d1``, ``d2h1``), else -1."""
    return gpu_of(lane) if kind_of(lane).per_gpu else -1

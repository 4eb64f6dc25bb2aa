"""Lanes and workers: who does an operation, and in which order.

A lane is a kind of work (GPU products, copies to a GPU, reads); a worker is who does
it. Lanes that share a worker take turns in the profile's order. Inside a lane demand
goes before prefetches and these before replacements; otherwise first come, first
served. Both clocks keep their queues here and differ only in how a worker works.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from moesim.engine.operations import DEMAND, PRIORITIES, Operation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Op = TypeVar("Op", bound=Operation)


class StagingGate(Protocol):
    """Staging slots that an operation with `staged` set must win before it starts."""

    def admit(self, operation: Any, /) -> bool:
        """Take a slot for it, if one is free."""


class WorkerQueues(Generic[Op]):
    """Queues of the lanes that one worker serves, first served first.

    Attributes:
        waiting: operations in all queues.
    """

    __slots__ = ("_lines", "_queue_of", "waiting")

    def __init__(
        self, lanes: Sequence[tuple[int, str]], gates: Mapping[str, StagingGate]
    ) -> None:
        """Make empty queues.

        Args:
            lanes: index and name of each lane, in the order in which they take turns.
            gates: lane name -> staging slots of its demand queue. Reads from an SSD
                are staged whatever their priority, since none of them can land
                anywhere else.
        """
        self.waiting = 0
        self._queue_of: dict[int, list[deque[Op]]] = {}
        self._lines: list[tuple[deque[Op], StagingGate | None]] = []
        for index, name in lanes:
            self._queue_of[index] = []
            for priority in PRIORITIES:
                gated = priority == DEMAND or name == "ssd"
                queue: deque[Op] = deque()
                self._queue_of[index].append(queue)
                self._lines.append((queue, gates.get(name) if gated else None))

    def push(self, operation: Op, priority: int) -> None:
        """Append an operation to its lane's queue."""
        self._queue_of[operation.lane][priority].append(operation)
        self.waiting += 1

    def withdraw(self, operation: Op, priority: int) -> bool:
        """Take back an operation that has not started; False if it has."""
        try:
            self._queue_of[operation.lane][priority].remove(operation)
        except ValueError:
            return False
        self.waiting -= 1
        return True

    def pick(self) -> Op | None:
        """Take out the first operation that may start now."""
        if not self.waiting:
            return None
        for queue, gate in self._lines:
            if not queue:
                continue
            # First come, first served holds for staged operations too: one that finds
            # no slot keeps those behind it waiting, but not the other queues.
            if gate is not None and queue[0].staged and not gate.admit(queue[0]):
                continue
            self.waiting -= 1
            return queue.popleft()
        return None


def gpu_of_lane(lane: str) -> int:
    """GPU of a lane that belongs to one (``gpu1``, ``h2d1``, ``d2h1``), else -1."""
    number = re.search(r"\d+$", lane)
    return int(number[0]) if number else -1

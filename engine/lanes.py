"""Lanes and workers: who does an operation, and in which order.

A lane is a kind of work (GPU products, copies to a GPU, reads); a worker is who does
it. Lanes that share a worker take turns in the profile's order. Inside a lane demand
goes before prefetches and these before replacements; otherwise first come, first
served. Both clocks keep their queues here and differ only in how a worker works.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from moesim.hwprofiles.lanes import gpu_of, kind_of
from moesim.policies.planner import plan as kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from moesim.policies.planner.plan import Copies, Plan

DEMAND: Final = 0
PREFETCH: Final = 1
REPLACEMENT: Final = 2
PRIORITIES: Final = (DEMAND, PREFETCH, REPLACEMENT)
"""Priorities inside a lane: lower goes first, and nothing is preempted."""

PRIORITY_OF: Final = {
    kinds.FETCH: DEMAND,
    kinds.READ: DEMAND,
    kinds.PREFETCH: PREFETCH,
    kinds.REPLACE: REPLACEMENT,
}
"""Priority of a copy by its kind."""


class Operation(Protocol):
    """A product, a copy, a read, a plan: one lane, from start to end.

    Attributes:
        lane: index of the lane.
        kind: kind of span (`moesim.traces.timeline.spans`).
        step: forward pass.
        layer: MoE layer; -1 where there is none.
        expert: expert; -1 where there is none.
        on_end: called when it has ended, with the operation.
    """

    lane: int
    kind: int
    step: int
    layer: int
    expert: int
    on_end: Callable[..., object] | None


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


class World(Protocol[Op]):
    """A clock with lanes. What a wait is, its driver knows."""

    @property
    def admission(self) -> Admission:
        """The gate that copies and reads pass when they could start."""

    @property
    def lanes(self) -> Sequence[str]:
        """Names of the lanes, by index."""

    # -- operations -------------------------------------------------------------------

    def submit(self, operation: Op, priority: int = ..., /) -> None:
        """Queue an operation; it starts at once if its worker is idle."""

    def withdraw(self, operation: Op, priority: int, /) -> None:
        """Take back an operation that has not started."""

    def offer(self) -> None:
        """Let workers look again at operations that waited for a place."""

    def read(self, step: int, layer: int, expert: int, *, demanded: bool) -> Op:
        """Make the read of an expert from the SSD into host memory."""

    def copy(self, copies: Copies, position: int, step: int, /) -> Op:
        """Make the copy of ``copies.experts[position]`` from host memory to a GPU."""

    def computes(self, plan: Plan, /) -> Iterable[Op]:
        """Make the products of a layer step, in launch order.

        What was computed ahead of its gate for all of its tokens is left out.
        """

    def precomputes(self, plan: Plan, /) -> Iterable[Op]:
        """Make the products of the next layer's experts that the CPU starts now."""

    def predictions(self, plan: Plan, /) -> Iterable[Op]:
        """Make what the GPU evaluates of coming layers in order to predict them.

        A world whose predictions are part of the model's own work makes nothing.
        """

    # -- what the engine reports ------------------------------------------------------

    def placed(self, operation: Op, gpu: int, /) -> None:
        """Note that a copy or (GPU -1) a read has taken its place and starts now."""

    def write_back(self, operation: Op, layer: int, expert: int, /) -> None:
        """Copy an expert to host memory that has left for a copy that starts now."""

    def computed(self, operation: Op | None, /) -> None:
        """Note that the last product of a layer step has ended; None if it had none."""

    # -- one layer step ---------------------------------------------------------------

    def now_s(self) -> float:
        """Seconds since the run began."""

    def exclusive(self) -> AbstractContextManager[object]:
        """Nothing starts or ends in the block."""

    def planned(self, plan: Plan, /) -> Iterable[Any]:
        """Note every access and spend the planning time; yields waits."""

    def launching(self, plan: Plan, /) -> None:
        """Make ready for the products of a plan, before anything of it is queued."""

    def all_computed(self) -> Any:
        """Wait for the last product of the layer step."""

    def joined(self, plan: Plan, /, *, cpu_used: bool) -> Iterable[Any]:
        """Bring results together; yields waits."""

    def end_layer(self) -> None:
        """Let the model go on; in the engine's exclusive block."""

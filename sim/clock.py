"""The virtual clock: SimPy's environment and its queue of events, walked by a loop for
one process.

SimPy's own loop calls a function for every event, and its process another one for every
wait. A replay has one process, which waits for its next turn and for nothing else, and
no event that can fail: so its turns need no events of their own. SimPy has no public
name for its queue, its counter and its time (`_queue`, `_eid`, `_now`), which a loop of
one's own must reach: this file alone does, `pyproject.toml` names the versions it was
written for, and `tests/sim/test_clock.py` fails should they change.

`Operation` and `Contention` make what runs at once slow each other down.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from simpy.core import Environment
from simpy.events import Event

from moesim.hwprofiles.lanes import kind_of
from moesim.sim.results import SimulationError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence


class Clock(Environment):
    """Virtual time.

    Attributes:
        now_s: seconds since the run began.
        queue: SimPy's heap of what is to happen: when, priority (at one instant, lower
            goes first), number, and the event, triggered already, as simpy.Timeout.
        numbers: tells apart what happens at one instant: first scheduled, first served.
        turns: how often the process was woken, waits for a time aside.
    """

    now_s: float

    def __init__(self) -> None:
        super().__init__()
        # Operations end so often that contention pushes them itself.
        self.queue: list[tuple[float, int, int, Event]] = self._queue  # type: ignore[assignment] # any int sorts
        self.numbers = self._eid
        self.turns = 0
        self._turn_is_due = False

    # Asked several times for every event, so it is no property as SimPy's own `now`.
    @property
    def _now(self) -> float:
        return self.now_s

    @_now.setter
    def _now(self, now_s: float) -> None:
        self.now_s = now_s

    def wake(self, _: object = None) -> None:
        """Give the process its turn when all callbacks of this event have returned,
        before anything else happens at this instant.
        """
        self.turns += 1
        self._turn_is_due = True

    def wake_after(self, delay_s: float) -> None:
        """Give the process its turn later."""
        timeout = self.timeout(delay_s)
        assert timeout.callbacks is not None
        timeout.callbacks.append(self._wait_ended)

    def _wait_ended(self, _: Event) -> None:
        self._turn_is_due = True

    def drive(self, process: Generator[Any, None, None]) -> None:
        """Run until a process has ended; each of its waits ends with its next turn.

        Raises:
            SimulationError: nothing is scheduled any more, and the process still waits.
        """
        queue = self.queue
        self._turn_is_due = True
        while True:
            while self._turn_is_due:
                self._turn_is_due = False
                try:
                    next(process)
                except StopIteration:
                    return
            if not queue:
                raise SimulationError("nothing is left to happen, and a layer waits")
            self.now_s, _, _, event = heappop(queue)
            callbacks = event.callbacks
            event.callbacks = None  # type: ignore[assignment] # as SimPy does it
            for callback in callbacks:
                callback(event)


_FIRST_PRIORITY = 2
"""SimPy keeps 0 and 1 for its own events; those of lanes come after them."""


class Operation(Event):
    """Something one lane does without interruption: a product, a copy, a read, a plan.

    It is the SimPy event of its own expected end; if that moves, an `_End` stands in
    for it.

    Attributes:
        lane: index of the lane.
        kind: kind of span.
        work_s: seconds it takes alone.
        nbytes: that it moves.
        on_end: called with the operation when its work is done.
        start_s: when it started; negative before.
        end_s: when its work is done; known at the end only where lanes slow each other.
        end: the event that counts as its end, if that is not the operation itself
            (which would be a cycle).
    """

    # As simpy.Timeout: triggered from birth, processed when its time comes. Class
    # attributes, as most never change.
    _ok = True
    _value = None
    _defused = False
    nbytes = 0
    on_end: Callable[..., object] | None = None
    start_s = -1.0
    end: Event | None = None
    end_s: float
    left_s: float
    rate: float
    settled_s: float

    def __init__(
        self,
        lane: int,
        kind: int,
        step: int,
        layer: int,
        expert: int,
        work_s: float,
    ) -> None:
        self.lane = lane
        self.kind = kind
        self.step = step
        self.layer = layer
        self.expert = expert
        self.work_s = work_s


class _End(Event):
    """A later or earlier end of an operation than first expected."""

    def __init__(self, operation: Operation) -> None:
        self._ok = True
        self._value = operation
        self._defused = False


class Contention:
    """Runs operations at rates that depend on what else is running.

    Args:
        clock: virtual time.
        lane_classes: class of every lane.
        slowdown: ``slowdown(victim_class, other_class) >= 1``.
        finished: called with each operation when its work is done.
    """

    def __init__(
        self,
        clock: Clock,
        lane_classes: Sequence[str],
        slowdown: Callable[[str, str], float],
        finished: Callable[[Operation], None],
    ) -> None:
        self._clock = clock
        self._queue = clock.queue
        self._numbers = clock.numbers
        self._finished = finished
        # Shared, as nobody else waits for the end of an operation.
        self._alone: list[Callable[..., None]] = [finished]
        # Within a kind, the operation that was scheduled first ends first.
        self._priority = [
            _FIRST_PRIORITY + kind_of(name).end_rank for name in lane_classes
        ]
        self._slowdown = [
            [slowdown(victim, other) for other in lane_classes]
            for victim in lane_classes
        ]
        self._running: list[Operation] = []
        self.events = 0
        alone = all(factor == 1.0 for row in self._slowdown for factor in row)
        self.start: Callable[[Operation], None] = (
            self._start_alone if alone else self._start
        )
        """Begin an operation now."""

    def _start(self, operation: Operation) -> None:
        """Begin an operation on a machine where lanes slow each other."""
        operation.start_s = operation.settled_s = self._clock.now_s
        operation.left_s = operation.work_s
        operation.rate = 0.0
        self._running.append(operation)
        self._adjust()

    def _start_alone(self, operation: Operation) -> None:
        """Begin an operation on a machine where nothing slows anything."""
        operation.start_s = now_s = self._clock.now_s
        operation.end_s = end_s = now_s + operation.work_s
        operation.callbacks = self._alone
        self.events += 1
        priority = self._priority[operation.lane]
        heappush(self._queue, (end_s, priority, next(self._numbers), operation))

    def _adjust(self) -> None:
        """Settle and re-schedule every operation whose rate has changed."""
        now_s = self._clock.now_s
        for operation in self._running:
            factors = self._slowdown[operation.lane]
            rate = 1.0
            for other in self._running:
                if other is not operation:
                    rate /= factors[other.lane]
            if rate != operation.rate:
                operation.left_s = max(
                    0.0,
                    operation.left_s - (now_s - operation.settled_s) * operation.rate,
                )
                end: Event = operation if operation.rate == 0.0 else _End(operation)
                operation.end = None if end is operation else end
                operation.settled_s = now_s
                operation.rate = rate
                end.callbacks = [self._ended]
                self.events += 1
                end_s = now_s + operation.left_s / rate
                priority = self._priority[operation.lane]
                heappush(self._queue, (end_s, priority, next(self._numbers), end))

    def _ended(self, end: Event) -> None:
        operation: Operation = end if isinstance(end, Operation) else end._value  # noqa: SLF001 - our own event
        if (operation.end or operation) is not end:
            return  # it has moved since
        operation.end_s = self._clock.now_s
        self._running.remove(operation)
        self._adjust()
        self._finished(operation)

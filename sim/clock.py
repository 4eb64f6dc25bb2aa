"""The virtual clock: SimPy's environment and its queue of events, walked by a loop for
one process.

SimPy's own loop calls a function for every event, and its process another one for every
wait. A replay has one process, which waits for its next turn and for nothing else, and
no event that can fail: so its turns need no events of their own.
"""

from __future__ import annotations

from heapq import heappop
from typing import TYPE_CHECKING, Any

from simpy.core import Environment

from moesim.sim.results import SimulationError

if TYPE_CHECKING:
    from collections.abc import Generator

    from simpy.events import Event


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

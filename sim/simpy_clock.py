"""Virtual time as SimPy keeps it: operations are its timeouts, the replay its process.

The model to read, and to extend with SimPy's own means: resources, further processes,
monitors. It gives what the fast clock gives, to the last bit and the last event.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import simpy

from moesim.sim.clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from moesim.engine.operations import Machine, Operation
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.sim.noise import Noise

_FIRST_PRIORITY = 2
"""SimPy keeps 0 and 1 for its own events; those of lanes come after them."""


class _Environment(simpy.Environment):
    """What happens at one instant happens in the order of its `priority`."""

    def schedule(
        self,
        event: simpy.Event,
        priority: Any = simpy.events.NORMAL,
        delay: float = 0,
    ) -> None:
        """Schedule an event, a turn or an end by the priority it has itself."""
        super().schedule(event, getattr(event, "priority", priority), delay)


class _Turn(simpy.Event):
    """The process's next turn: before anything else at its instant."""

    priority = simpy.events.URGENT


class _End(simpy.Timeout):
    """When an operation is expected to end; it may move, and then this is void."""

    def __init__(
        self, env: simpy.Environment, operation: Operation, delay_s: float, rank: int
    ) -> None:
        self.priority = _FIRST_PRIORITY + rank
        self.operation = operation
        self.order = operation.order
        super().__init__(env, delay_s)


class SimpyClock(VirtualClock):
    """Runs operations in a SimPy environment.

    Attributes:
        env: the environment.
    """

    def __init__(self, profile: HardwareProfile, noise: Noise | None) -> None:
        super().__init__(profile, noise)
        self.env = _Environment()
        self._turn: simpy.Event = _Turn(self.env)
        self._machine: Machine | None = None

    def schedule(self, operation: Operation, delay_s: float) -> None:
        """Expect an end; what was expected before counts no more."""
        super().schedule(operation, delay_s)
        end = _End(self.env, operation, delay_s, self.rank[operation.lane])
        end.callbacks.append(self._ended)

    def wake(self) -> None:
        """Give the process its turn when all that happens now has happened."""
        self.turns += 1
        self._turn.succeed()

    def sleep(self, until_s: float) -> None:
        """Give the process its turn at a later time."""
        self._turn = self.env.timeout(until_s - self.env.now)

    def drive(self, process: Iterator[None], machine: Machine) -> bool:
        """Run until the process has ended; False if it waits for nothing."""
        self._machine = machine
        walk = self.env.process(self._walk(process))
        try:
            self.env.run(until=walk)
        except RuntimeError:
            # SimPy's own: the process waits, and nothing is left to happen.
            if walk.is_alive and self.env.peek() == math.inf:
                return False
            raise
        return True

    def _walk(self, process: Iterator[None]) -> Generator[simpy.Event, None, None]:
        """The replay, as SimPy's process: each of its waits ends with its turn."""
        for _ in process:
            yield self._turn
            self.now_s = self.env.now
            self._turn = _Turn(self.env)

    def _ended(self, end: _End) -> None:
        operation = end.operation
        # It has moved since, or has ended and become another one.
        if end.order != operation.order:
            return
        self.now_s = self.env.now
        self.end(operation)
        self._machine.ended(operation)

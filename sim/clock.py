"""Virtual time without events: the few operations that run at once are looked through
for the next end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.engine.operations import Clock
from moesim.hwprofiles.lanes import kind_of
from moesim.policies.arrays import zeros
from moesim.sim.noise import BLOCK, Noise
from moesim.traces.timeline.spans import CHUNK_SPANS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.engine.operations import Machine, Operation
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.arrays import Floats, Ints


NEVER_S = float("inf")


class Spans:
    """What has ended, column by column, until there is enough for a chunk."""

    def __init__(self) -> None:
        self.count = 0
        self._make(2 * CHUNK_SPANS)

    def _make(self, room: int) -> None:
        self.room = room
        self.lane: Ints = zeros(room, np.int8)
        self.kind: Ints = zeros(room, np.int8)
        self.step: Ints = zeros(room, np.int32)
        self.layer: Ints = zeros(room, np.int16)
        self.expert: Ints = zeros(room, np.int32)
        self.start_s: Floats = zeros(room)
        self.end_s: Floats = zeros(room)
        self.nbytes: Ints = zeros(room, np.int64)

    def add(self, operation: Operation) -> None:
        """Note one."""
        n = self.count
        if n == self.room:
            self._grow()
        self.lane[n] = operation.lane
        self.kind[n] = operation.kind
        self.step[n] = operation.step
        self.layer[n] = operation.layer
        self.expert[n] = operation.expert
        self.start_s[n] = operation.start_s
        self.end_s[n] = operation.end_s
        self.nbytes[n] = operation.nbytes
        self.count = n + 1

    def _grow(self) -> None:
        held = self._columns()
        self._make(2 * self.room)
        for name, column in self._columns().items():
            column[: self.count] = held[name]

    def _columns(self) -> dict[str, np.ndarray]:
        return {
            "lane": np.asarray(self.lane),
            "kind": np.asarray(self.kind),
            "step": np.asarray(self.step),
            "layer": np.asarray(self.layer),
            "expert": np.asarray(self.expert),
            "start_s": np.asarray(self.start_s),
            "end_s": np.asarray(self.end_s),
            "bytes": np.asarray(self.nbytes),
        }

    def cut(self) -> dict[str, np.ndarray]:
        """The chunk so far; then there is room again."""
        chunk = {
            name: column[: self.count].copy()
            for name, column in self._columns().items()
        }
        self.count = 0
        return chunk


class VirtualClock(Clock):
    """Runs operations at rates that depend on what else is running.

    Args:
        profile: how much lanes slow each other, and in which order they end at one
            instant.
        noise: draws factors on the time of operations; None takes means.

    Attributes:
        spans: takes what has ended.
        scheduled: ends that were expected, re-scheduled ones too.
    """

    def __init__(self, profile: HardwareProfile, noise: Noise | None) -> None:
        Clock.__init__(self)
        kinds = [kind_of(name) for name in profile.lanes]
        slowdown = [
            [profile.contention.slowdown(first.name, second.name) for second in kinds]
            for first in kinds
        ]
        table = np.array(slowdown, np.float64)
        self.alone = bool((table == 1.0).all())
        self.slowdown: Floats = table.data
        ranks = np.array([kind.end_rank for kind in kinds], np.int32)
        self.rank: Ints = ranks.data
        self.spans = Spans()
        # A worker is busy with one operation at a time.
        self.running: list[Operation | None] = [None] * len(kinds)
        self.count = 0
        self.scheduled = 0
        self.noisy = noise is not None
        self._noise = noise
        # By lane: factors that are drawn, and how many of them are used.
        self._factors: list[list[float]] = [[] for _ in kinds]
        self._used: Ints = zeros(len(kinds), np.int64)

    def start(self, operation: Operation) -> None:
        """Begin an operation now."""
        if self.noisy:
            operation.work_s *= self._factor(operation.lane)
        operation.start_s = self.now_s
        self.running[self.count] = operation
        self.count += 1
        if self.alone:
            self.schedule(operation, operation.work_s)
            return
        operation.settled_s = self.now_s
        operation.left_s = operation.work_s
        operation.rate = 0.0
        self._adjust()

    def _factor(self, lane: int) -> float:
        """Draw the next factor of a lane."""
        used = self._used[lane]
        factors = self._factors[lane]
        if used == len(factors):
            factors = self._noise.factors(lane, BLOCK).tolist()
            self._factors[lane] = factors
            used = 0
        self._used[lane] = used + 1
        return factors[used]

    def schedule(self, operation: Operation, delay_s: float) -> None:
        """Expect an end; what was expected before counts no more."""
        operation.end_s = self.now_s + delay_s
        operation.order = self.scheduled
        self.scheduled += 1

    def end(self, operation: Operation) -> None:
        """Let an operation end now."""
        running = self.running
        n = 0
        while running[n] is not operation:
            n += 1
        self.count -= 1
        for later in range(n, self.count):
            running[later] = running[later + 1]
        if not self.alone:
            self._adjust()
        self.spans.add(operation)

    def sleep(self, until_s: float) -> None:
        """Give the process its turn at a later time."""
        raise NotImplementedError

    def drive(self, process: Iterator[None], machine: Machine) -> bool:
        """Run until the process has ended; False if it waits for nothing."""
        raise NotImplementedError

    def _adjust(self) -> None:
        """Settle and re-schedule every operation whose rate has changed."""
        running = self.running
        count = self.count
        for n in range(count):
            operation = running[n]
            rate = 1.0
            for m in range(count):
                if m != n:
                    other = running[m]
                    rate /= self.slowdown[operation.lane, other.lane]
            if rate != operation.rate:
                done_s = (self.now_s - operation.settled_s) * operation.rate
                operation.left_s = max(0.0, operation.left_s - done_s)
                operation.settled_s = self.now_s
                operation.rate = rate
                self.schedule(operation, operation.left_s / rate)


class FastClock(VirtualClock):
    """Walks through time by itself."""

    def __init__(self, profile: HardwareProfile, noise: Noise | None) -> None:
        VirtualClock.__init__(self, profile, noise)
        self.turn = True
        self.wakes_at_s = NEVER_S

    def sleep(self, until_s: float) -> None:
        """Give the process its turn at a later time."""
        # As SimPy adds up.
        self.wakes_at_s = self.now_s + (until_s - self.now_s)

    def wake(self) -> None:
        """Let the process go on next."""
        self.turn = True
        self.turns += 1

    def drive(self, process: Iterator[None], machine: Machine) -> bool:
        """Run until the process has ended; False if it waits for nothing."""
        while True:
            while self.turn:
                self.turn = False
                if next(process, True) is True:
                    return True
            operation = self._next_end()
            if operation is None or operation.end_s >= self.wakes_at_s:
                if self.wakes_at_s == NEVER_S:
                    return False
                self.now_s = self.wakes_at_s
                self.wakes_at_s = NEVER_S
                self.turn = True
                continue
            self.now_s = operation.end_s
            self.end(operation)
            machine.ended(operation)

    def _next_end(self) -> Operation | None:
        """What ends next: what was scheduled first, among equal lanes."""
        running = self.running
        count = self.count
        if not count:
            return None
        first = running[0]
        for n in range(1, count):
            other = running[n]
            if other.end_s > first.end_s:
                continue
            if other.end_s == first.end_s:
                rank = self.rank[other.lane] - self.rank[first.lane]
                if rank > 0 or (rank == 0 and other.order > first.order):
                    continue
            first = other
        return first

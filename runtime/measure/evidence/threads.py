"""What the operating system says about a thread while it works: was it disturbed?

A thread that computes takes as much time on the wall as on its core. What it lost to
others shows in the kernel's counters: how long it waited to run although it could, and
how often it was made to stop. Where a system does not count, nothing is known.
"""

from __future__ import annotations

import os
import time
from typing import Final, NamedTuple

try:
    import resource
except ImportError:  # Windows does not have it
    resource = None  # type: ignore[assignment]

_SCHEDSTAT: Final = "/proc/thread-self/schedstat"
_UNKNOWN_S: Final = float("nan")


class Counters(NamedTuple):
    """Counters of one thread; differences of two readings tell what lies between.

    Attributes:
        cpu_s: seconds on a core.
        waited_s: seconds in which it could have run and others did; NaN if not counted.
        switches: how often it was made to stop; -1 if not counted.
    """

    cpu_s: float
    waited_s: float
    switches: int

    def since(self, earlier: Counters) -> Counters:
        """What was counted after an earlier reading."""
        switches = self.switches - earlier.switches if self.switches >= 0 else -1
        return Counters(
            self.cpu_s - earlier.cpu_s, self.waited_s - earlier.waited_s, switches
        )


class ThreadEvidence:
    """Reads the calling thread's counters; make it on the thread that reads.

    A reading takes about 3 µs.
    """

    def __init__(self) -> None:
        try:
            self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY)
        except OSError:
            self._schedstat = -1
        self._of_thread = getattr(resource, "RUSAGE_THREAD", None)

    def read(self) -> Counters:
        """Read all counters now."""
        waited_s = _UNKNOWN_S
        if self._schedstat >= 0:
            # Nanoseconds on a core, nanoseconds waiting, times it ran.
            fields = os.pread(self._schedstat, 64, 0).split()
            waited_s = int(fields[1]) * 1e-9
        switches = -1
        if self._of_thread is not None:
            switches = resource.getrusage(self._of_thread).ru_nivcsw
        return Counters(time.thread_time(), waited_s, switches)

    def close(self) -> None:
        """Close the file."""
        if self._schedstat >= 0:
            os.close(self._schedstat)
            self._schedstat = -1

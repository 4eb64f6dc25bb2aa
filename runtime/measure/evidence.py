"""What the system counts while a run is measured: time that others took from its
threads, and what the machine was busy with.

Threads of a run see what other threads of this system take from them
(`moesim.runtime.measure.evidence`). What a hypervisor gives to other guests
they do not: the kernel counts that as *stolen*. *Pressure* is time in which some thread
of the system waited for a core. Where a system does not count, nothing is known.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
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


_STAT: Final = Path("/proc/stat")
_PRESSURE: Final = Path("/proc/pressure/cpu")
_STEAL: Final = 8
"""Place of stolen ticks in the first line of ``/proc/stat``; see proc(5)."""
_UNKNOWN: Final = float("nan")


class SystemShares(NamedTuple):
    """Shares of the time between two readings, NaN where they are not counted.

    Attributes:
        stolen: of all cores' time, what a hypervisor gave to others.
        pressure: of the time, in which some thread waited for a core.
    """

    stolen: float
    pressure: float


class SystemEvidence:
    """Reads the machine's counters, and remembers them until the next reading.

    Args:
        stat, pressure: files of the kernel.
    """

    def __init__(self, stat: Path = _STAT, pressure: Path = _PRESSURE) -> None:
        self._stat = stat
        self._pressure = pressure
        self._before = self._read()

    def shares(self) -> SystemShares:
        """What was counted since the reading before."""
        before = self._before
        now = self._before = self._read()
        ticks, stolen, pressure_s, at_s = (
            later - earlier for later, earlier in zip(now, before, strict=True)
        )
        return SystemShares(
            stolen=stolen / ticks if ticks > 0 else _UNKNOWN,
            # Clocks of two counters differ a little. NaN first: it is what stays.
            pressure=min(pressure_s / at_s, 1.0),
        )

    def _read(self) -> tuple[float, float, float, float]:
        """Ticks of all cores, stolen ones among them, seconds of pressure, and when."""
        ticks = stolen = pressure_s = _UNKNOWN
        try:
            fields = self._stat.read_text(encoding="ascii").split("\n", 1)[0].split()
            # Guests' ticks, behind the stolen ones, are counted among users' as well.
            counts = [int(field) for field in fields[1 : _STEAL + 1]]
            if len(counts) == _STEAL:
                ticks = float(sum(counts))
                stolen = float(counts[-1])
        except (OSError, ValueError):
            pass
        try:
            for line in self._pressure.read_text(encoding="ascii").splitlines():
                if line.startswith("some "):
                    pressure_s = int(line.rpartition("total=")[2]) * 1e-6
        except (OSError, ValueError):
            pass
        return ticks, stolen, pressure_s, time.perf_counter()

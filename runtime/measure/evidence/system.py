"""What the kernel counts of the whole machine while something is measured.

Threads of a run see what other threads of this system take from them
(`moesim.runtime.measure.evidence.threads`). What a hypervisor gives to other guests
they do not: the kernel counts that as *stolen*. *Pressure* is time in which some thread
of the system waited for a core. Where a system does not count, nothing is known.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, NamedTuple

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

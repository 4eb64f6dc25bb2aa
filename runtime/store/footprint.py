"""The host memory that a run may take, and how much it took.

A budget is a sum: what the process held before, the expert slots of each memory, the
weights that are no experts, keys and values, what a step computes with, and a stated
allowance for the rest (a run's records, code that is loaded on first use). The kernel
keeps the highest mark of what was resident; set back before a run, it says whether the
sum was right.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

if TYPE_CHECKING:
    from moesim.runtime.executor.executor import Executor

WORKING_BYTES: Final = 16 << 20
"""Allowance for everything that has no size of its own in a budget: a run's records,
and code that is loaded on first use. Beside it, one record while memories are filled.
"""

_PROC: Final = Path("/proc/self")

# proc(5): writing 5 to clear_refs sets the highest mark back to what is resident.
_RESET_PEAK: Final = "5"


class Footprint(NamedTuple):
    """Bytes of host memory.

    Attributes:
        before: resident before the run: interpreter, libraries, the trace.
        dense: weights that are no experts, where they lie in host memory.
        kept: keys and values, likewise.
        host_slots: experts in host memory.
        device_slots: slots of the host accelerator; those of a GPU are no host memory.
        working: what a step computes with, and the allowance for the rest.
        peak: most that was resident at one time during the run.
    """

    before: int
    dense: int
    kept: int
    host_slots: int
    device_slots: int
    working: int
    peak: int

    @property
    def budget(self) -> int:
        """What the run may hold at one time."""
        return sum(self) - self.peak

    def to_json(self) -> dict[str, int]:
        """Plain values."""
        values = {f"{name}_bytes": value for name, value in self._asdict().items()}
        return values | {"budget_bytes": self.budget}


class Meter:
    """Measures the host memory of one run. Make it before anything of the run is
    allocated: it notes what is resident, and sets the highest mark back where the
    system can.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            (_PROC / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")
        self._before = int(psutil.Process().memory_info().rss)
        self._peak = 0
        self._host_slots = 0
        self._device_slots = 0
        self._record = 0

    def read(self, executor: Executor) -> None:
        """Note the bytes of the run's slots, and the most that was resident; call
        before the slots are freed.
        """
        host = executor.memories.host.tier
        self._host_slots = host.total_bytes
        self._record = host.slot_bytes
        # A GPU's slots lie in its own memory.
        if executor.device.device.type == "cpu":
            self._device_slots = executor.memories.slots.slots.total_bytes
        self._peak = peak_bytes()

    def footprint(self, dense: int, kept: int, computing: int) -> Footprint:
        """Sum up.

        Args:
            dense: bytes of non-expert weights in host memory.
            kept: bytes of keys and values there.
            computing: bytes that a step computes with there.
        """
        return Footprint(
            before=self._before,
            dense=dense,
            kept=kept,
            host_slots=self._host_slots,
            device_slots=self._device_slots,
            working=WORKING_BYTES + self._record + computing,
            peak=self._peak,
        )


def peak_bytes() -> int:
    """Most host memory that this process held since the mark was set back; since its
    start where it cannot be.
    """
    try:
        status = (_PROC / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _peak_since_start()

    for line in status.splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10  # the kernel writes kB
    return _peak_since_start()


def _peak_since_start() -> int:
    """Ask the system for the highest mark since the process began."""
    import resource  # noqa: PLC0415 - not on every system

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, all others KiB.
    return most if sys.platform == "darwin" else most << 10

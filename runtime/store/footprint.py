"""How much host memory a run may take, and how much it took.

A budget is a sum: what the process held before, each shelf of expert slots, the weights
that are no experts, keys and values, and a stated allowance for what a run works with
(activations, its records, code that is loaded on first use). The kernel keeps the
highest mark of what was resident; set back before a run, it says whether the sum was
true.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

if TYPE_CHECKING:
    from moesim.runtime.executor.executor import Executor

WORKING_BYTES: Final = 64 << 20
"""Allowance for everything that has no size of its own in a budget; beside it, one
record while memories are filled.
"""


class Footprint(NamedTuple):
    """Bytes of host memory.

    Attributes:
        before: resident before the run: interpreter, libraries, the trace.
        dense: weights that are no experts, where they lie in host memory.
        kept: keys and values, likewise.
        host_slots: experts in host memory.
        device_slots: slots of the host accelerator; those of a GPU are no host memory.
        working: allowance for the rest.
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
        return {f"{name}_bytes": value for name, value in self._asdict().items()} | {
            "budget_bytes": self.budget
        }


class Meter:
    """Watches one run; make it before anything of the run is allocated. The mark is set
    back where the system can.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = int(psutil.Process().memory_info().rss)
        self._peak = self._host_slots = self._device_slots = self._record = 0

    def read(self, executor: Executor) -> None:
        """Note what the run's shelves hold, and the most that was resident; call before
        they are given back.
        """
        self._host_slots = executor.memories.host.tier.total_bytes
        self._device_slots = (
            executor.memories.slots.slots.total_bytes
            if executor.device.device.type == "cpu"
            else 0
        )
        self._record = executor.memories.host.tier.slot_bytes
        self._peak = peak_bytes()

    def footprint(self, dense: int, kept: int) -> Footprint:
        """Lay out the bill, given the bytes of non-expert weights and of keys and
        values in host memory.
        """
        working = WORKING_BYTES + self._record
        return Footprint(
            self._before,
            dense,
            kept,
            self._host_slots,
            self._device_slots,
            working,
            self._peak,
        )


def peak_bytes() -> int:
    """Most host memory that this process held since the mark was set back; since its
    start where it cannot be.
    """
    try:
        lines = (
            Path("/proc/self/status")
            .read_text(encoding="ascii", errors="replace")
            .splitlines()
        )
        return next(
            int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")
        )
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most << 10

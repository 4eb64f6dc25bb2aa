"""Cores and memory of the host that this process may use: those of the machine, less
what an affinity mask or a control group takes away.

A container sees all cores and all memory of its machine, and is throttled or killed
beyond its share.

Source: Linux, "Control Group v2" (cpu.max, memory.max) and cgroup-v1 (cpu.cfs_quota_us,
memory.limit_in_bytes).
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")
_CPU_INFO: Final = Path("/proc/cpuinfo")


def load_average() -> float:
    """Return the load of the last minute, 0 where the system does not count it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def processor() -> str:
    """Name the CPU as the kernel does."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    # Not every architecture's kernel writes a model name.
    return platform.processor() or platform.machine()


def available_cores() -> int:
    """Count the cores that this process may keep busy, at least one."""
    # macOS and Windows have no affinity masks.
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    for folder in _folders("cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota = _read(folder / "cpu.cfs_quota_us")
            period = _read(folder / "cpu.cfs_period_us")
        # "max" and -1 stand for no limit.
        if quota.isdigit() and period.isdigit():
            count = min(count, int(quota) // int(period))
    return max(1, count)


def total_memory_bytes() -> int:
    """Bytes of memory that this process may have at most."""
    limits = [limit for limit, _ in _memory_limits()]
    import psutil  # noqa: PLC0415 - whoever counts cores alone needs none

    return min([int(psutil.virtual_memory().total), *limits])


def available_memory_bytes() -> int:
    """Bytes of memory that this process can still take without swapping."""
    left = [max(0, limit - used) for limit, used in _memory_limits()]
    import psutil  # noqa: PLC0415 - as above

    return min([int(psutil.virtual_memory().available), *left])


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Limit of each control group above this process, and what it uses of it: file
    pages that nobody has touched lately are given up first and do not count.
    """
    for folder in _folders("memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(
            folder / "memory.usage_in_bytes"
        )
        if not (limit.isdigit() and used.isdigit()):
            continue
        statistics = dict(
            line.split()[:2] for line in _read(folder / "memory.stat").splitlines()
        )
        idle = statistics.get("inactive_file") or statistics.get("total_inactive_file")
        yield int(limit), int(used) - int(idle or 0)


def _folders(controller: str) -> Iterator[Path]:
    """Folders of the control groups that hold this process, innermost first."""
    for line in _read(_OWN_GROUPS).splitlines():
        _, controllers, group = line.split(":", 2)
        # Version 2 has one hierarchy, without names.
        if controllers and controller not in controllers.split(","):
            continue
        root = _GROUPS / controllers if controllers else _GROUPS
        folder = root / group.lstrip("/")
        while folder != root:
            yield folder
            folder = folder.parent
        yield root


def _read(path: Path) -> str:
    """Text of one of the kernel's files; nothing where there is none."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""

"""Cores and memory of the host that this process may use, and checks of it that need no
torch.

A container sees all cores and all memory of its machine, and is throttled or killed
beyond its share: what may be used is what there is, less what an affinity mask or a
control group takes away.

Source: Linux, "Control Group v2" (cpu.max, memory.max) and cgroup-v1 (cpu.cfs_quota_us,
memory.limit_in_bytes).
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from moesim.base import extensions

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
    return max(1, min([len(_allowed_cores()), *map(int, _quotas())]))


def _allowed_cores() -> list[int]:
    """Numbers of the cores that this process may run on."""
    # macOS and Windows have no affinity masks.
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _quotas() -> Iterator[float]:
    """Cores' worth of time that each control group above this process may use, where it
    has a limit.
    """
    for folder in _folders("cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota = _read(folder / "cpu.cfs_quota_us")
            period = _read(folder / "cpu.cfs_period_us")
        # "max" and -1 stand for no limit.
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


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


# -- checks ----------------------------------------------------------------------------


Verdict = Literal["ok", "limited", "fails"]
"""``limited``: all works, with a consequence that is stated."""

LEAST_FREE_BYTES = 1 << 30
"""Memory, or room on a disk, below which something will fail soon."""


class Finding(NamedTuple):
    """The outcome of one check.

    Attributes:
        verdict: whether it holds.
        outcome: what was found, in a line.
        way_out: what helps, where it does not hold.
        figures: numbers behind the line.
    """

    verdict: Verdict
    outcome: str
    way_out: str = ""
    figures: dict[str, Any] | None = None


def holds(outcome: str, **figures: Any) -> Finding:
    """All is well."""
    return Finding("ok", outcome, figures=figures)


def limited(outcome: str, way_out: str, **figures: Any) -> Finding:
    """It works, and something is lost."""
    return Finding("limited", outcome, way_out, figures)


def fails(outcome: str, way_out: str, **figures: Any) -> Finding:
    """It does not work."""
    return Finding("fails", outcome, way_out, figures)


def check_extensions(state: tuple[str, str] | None = None) -> Finding:
    """Does what has C types run compiled?"""
    how, why = extensions.state() if state is None else state
    if how == "compiled":
        return holds("policies, the fast engine and loops over traces run compiled")
    way_out = "install a C compiler, then run `pip install` again, or `make build`"
    if extensions.PLAIN_VARIABLE in why:
        way_out = f"unset {extensions.PLAIN_VARIABLE}"
    return limited(f"{why}: all runs as Python, about 40 times slower", way_out)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 - the system's own
    """Make a semaphore, as processes that share work need one."""
    way_out = "sweeps: --jobs 1, or give the container /dev/shm (`--shm-size 1g`)"
    try:
        multiprocessing.get_context("spawn").Semaphore()
    except (OSError, ImportError) as error:
        return limited(f"no semaphores ({error}): one process at a time", way_out)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return limited(f"{folder} is not there or read-only", way_out)
    free = shutil.disk_usage(folder).free
    return holds(f"{folder}, {free / 2**30:.1f} GiB free", free_bytes=free)


def check_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> Finding:
    """Count cores, their siblings, the share that a container may use, and what other
    programs take.
    """
    allowed = _allowed_cores()
    present = os.cpu_count() or len(allowed)
    # A quota, which takes further cores away, is a finding of its own.
    count = len(allowed)
    physical = {_siblings(cpus, core) for core in allowed}
    words = f"{count} of {present} cores of {processor()}"
    if len(physical) < count:
        words += f", siblings on {len(physical)} physical cores"
    share = min(_quotas(), default=None)
    figures = {"cores": count, "physical": len(physical), "quota_cores": share}
    if count < 2 or (share is not None and share <= 1):
        return limited(
            f"{words}: lanes take turns on one core, nothing overlaps",
            "give the process two cores or more (taskset, --cpus)",
            **figures,
        )
    if share is not None and share < count:
        return limited(
            f"{words}, but a quota of {share:.1f}: lanes are stopped now and then",
            "lift the container's quota (--cpus), or name its cores (--cpuset-cpus)",
            **figures,
        )
    load = load_average()
    if load > 0.5 * count:
        return limited(
            f"{words}; other programs keep {load:.1f} busy",
            "close them before anything is timed",
            load=load,
            **figures,
        )
    return holds(words, load=load, **figures)


def _siblings(cpus: Path, core: int) -> str:
    """The threads of a core's physical core, as the kernel lists them."""
    listed = cpus / f"cpu{core}" / "topology" / "thread_siblings_list"
    try:
        return listed.read_text(encoding="utf-8").strip()
    except OSError:
        return str(core)


def check_memory() -> Finding:
    """Tell the memory that there is, and what is left of it."""
    available = available_memory_bytes()
    total = total_memory_bytes()
    words = f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB available"
    figures = {"total_bytes": total, "available_bytes": available}
    if available < 2 * LEAST_FREE_BYTES:
        return limited(words, "close other programs, or limit --host-memory", **figures)
    return holds(words, **figures)


def check_huge_pages(
    setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled"),
) -> Finding:
    """Tell whether slots may lie in huge pages: a direct read into scattered small ones
    takes up to twice as long.
    """
    way_out = f"as root: echo madvise > {setting}"
    try:
        chosen = setting.read_text(encoding="utf-8").split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return limited("the system has none: reads may take twice as long", way_out)
    if chosen == "never":
        return limited("switched off: reads may take twice as long", way_out)
    return holds(f"transparent huge pages: {chosen}", setting=chosen)

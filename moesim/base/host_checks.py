"""Checks of this machine that need no torch: what it has, and what that means."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from moesim.base import extensions
from moesim.base.host_limits import (
    available_cores,
    available_memory_bytes,
    load_average,
    processor,
    total_memory_bytes,
)

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


def check_cores(
    cpus: Path = Path("/sys/devices/system/cpu"),
    quota: Path = Path("/sys/fs/cgroup/cpu.max"),
) -> Finding:
    """Count cores, their siblings, the share that a container may use, and what other
    programs take.
    """
    present = psutil.cpu_count() or available_cores()
    allowed = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(present))
    )
    # A quota, which takes further cores away, is a finding of its own.
    count = len(allowed)
    physical = {_siblings(cpus, core) for core in allowed}
    words = f"{count} of {present} cores of {processor()}"
    if len(physical) < count:
        words += f", siblings on {len(physical)} physical cores"
    share = _quota_cores(quota)
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


def _quota_cores(quota: Path) -> float | None:
    """Cores' worth of time that a container may use; None without a limit."""
    try:
        most, period = quota.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return None if most == "max" else int(most) / int(period)


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

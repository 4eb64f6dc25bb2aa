"""Checks of the system below a run: torch, memory, cores, the disk.

Each function returns a `Finding`. Files of the kernel are arguments, so that tests can
show other machines.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil
import torch

from moesim.runtime.accelerators.here import accelerator_here
from moesim.runtime.doctor.finding import Finding, fails, holds, limited
from moesim.runtime.errors import RuntimeFault
from moesim.runtime.measure.machine import available_cores, load_average, processor
from moesim.runtime.store.direct_io import DirectFile
from moesim.runtime.store.memory import HostSlots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MIB: Final = 1 << 20
READ_BYTES: Final = 4 * _MIB
_READS: Final = 16
_LEAST_FREE_BYTES: Final = 1 << 30

CARDS: Final[Mapping[str, str]] = {
    "/dev/nvidia0": "NVIDIA",
    "/dev/kfd": "AMD",
    "/dev/dri/renderD128": "other",
}
"""Files of the kernel -> whose graphics they stand for."""


def check_torch(cards: Sequence[str] | None = None) -> Finding:
    """Name torch, and the accelerator that it finds.

    Args:
        cards: makers of graphics that the system shows; looked for when None.
    """
    version = f"torch {torch.__version__}"
    accelerator = accelerator_here()
    if accelerator is not None:
        memory = accelerator.total_bytes / 2**30
        return holds(
            f"{version}, {accelerator.driver}: {accelerator.name}, {memory:.1f} GiB",
            kind=accelerator.kind,
            unified=accelerator.unified,
        )
    if cards is None:
        cards = [maker for path, maker in CARDS.items() if Path(path).exists()]
    known = [maker for maker in cards if maker != "other"]
    if known:
        return fails(
            f"{version} finds no accelerator, but the system has {known[0]} graphics",
            "install the torch build for it (pytorch.org, 'Get started'), and its"
            " driver",
        )
    return holds(
        f"{version}, no graphics: a core of {processor()} stands in", kind="host"
    )


def check_page_lock() -> Finding:
    """Page-lock some memory for the accelerator, where there is one."""
    accelerator = accelerator_here()
    if accelerator is None or not accelerator.page_locks:
        return holds("not needed: no copies to a device's own memory")
    try:
        with HostSlots(64, _MIB, page_lock=accelerator):
            return holds("64 MiB page-locked")
    except RuntimeFault as error:
        return fails(
            str(error), "raise the limit: `ulimit -l unlimited`, or --ulimit memlock=-1"
        )


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
    count = available_cores()
    present = psutil.cpu_count() or count
    allowed = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(count))
    )
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
    memory = psutil.virtual_memory()
    words = (
        f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    )
    figures = {"total_bytes": memory.total, "available_bytes": memory.available}
    if memory.available < 2 * _LEAST_FREE_BYTES:
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


def check_direct_io(folder: Path) -> Finding:
    """Read a file around the page cache."""
    with _file(folder) as place:
        file = DirectFile(place)
        try:
            with HostSlots(1, READ_BYTES) as slots:
                file.read_into(0, memoryview(slots.record(0).numpy()))
        finally:
            file.close()
        if file.direct:
            return holds(f"reads in {folder} go around the page cache")
        return limited(
            f"{folder}: {file.reason}, so they may come from memory",
            "put experts on a disk with ext4 or xfs: --store DIR",
            reason=file.reason,
        )


def check_disk(folder: Path) -> Finding:
    """Read a file in pieces of an expert's size."""
    usage = shutil.disk_usage(folder)
    with _file(folder, _READS * READ_BYTES) as place:
        file = DirectFile(place)
        times_s = []
        try:
            with HostSlots(1, READ_BYTES) as slots:
                view = memoryview(slots.record(0).numpy())
                for read in range(_READS):
                    begin_s = time.perf_counter()
                    file.read_into(read * READ_BYTES, view)
                    times_s.append(time.perf_counter() - begin_s)
        finally:
            file.close()
    rate = READ_BYTES / float(np.median(times_s))
    words = f"{rate / 1e9:.2f} GB/s in pieces of 4 MiB"
    figures: dict[str, Any] = {"bytes_per_s": rate}
    # Some file systems in memory count nothing.
    if usage.total:
        words += f", {usage.free / 2**30:.0f} GiB free"
        figures["free_bytes"] = usage.free
    if usage.total and usage.free < _LEAST_FREE_BYTES:
        return limited(words, "make room, or name another disk: --disk DIR", **figures)
    return holds(words, **figures)


class _file:  # noqa: N801 - used as a function
    """A file of noise in a folder, while a block runs.

    Raises:
        RuntimeFault: it cannot be written.
    """

    def __init__(self, folder: Path, nbytes: int = READ_BYTES) -> None:
        self._place = folder / f".moesim-doctor-{os.getpid()}"
        self._nbytes = nbytes

    def __enter__(self) -> Path:
        """Write it."""
        noise = np.random.default_rng(0).bytes(READ_BYTES)
        try:
            with self._place.open("wb") as file:
                for _ in range(self._nbytes // READ_BYTES):
                    file.write(noise)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._place.unlink(missing_ok=True)
            raise RuntimeFault(
                f"{self._place.parent}: cannot write: {error.strerror}; name another"
                " folder: --disk DIR"
            ) from None
        return self._place

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        self._place.unlink(missing_ok=True)

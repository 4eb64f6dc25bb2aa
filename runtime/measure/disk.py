"""Measures reads of the disk that will hold the experts, around the page cache."""

from __future__ import annotations

import os
import random
import shutil
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import psutil

from moesim.hwprofiles.calibration.fit_curves import fit_line
from moesim.runtime.errors import RuntimeFault
from moesim.runtime.measure.timing import sample
from moesim.runtime.store.direct_io import BLOCK_BYTES, DirectFile
from moesim.runtime.store.memory import HostSlots
from moesim.traces.files import ScratchFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.runtime.measure.measurements import Measurements

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20

READ_BYTES: Final = (128 * _KIB, 512 * _KIB, 2 * _MIB, 8 * _MIB)
_NOISE_BYTES: Final = 8 * _MIB
_MEMORY_FILE_SYSTEMS: Final = ("tmpfs", "ramfs")
_FILE_NAME: Final = "noise"


class DiskReport(NamedTuple):
    """How reads were measured.

    Attributes:
        summary: what was read, or why nothing was.
        core_share: share of a read's time in which it kept its core busy; None if
            nothing was read.
    """

    summary: str
    core_share: float | None


def measure_disk(
    measurements: Measurements, folder: Path, *, file_bytes: int, seconds: float
) -> DiskReport:
    """Write a file of noise, read pieces of it at random positions by size, and remove
    it.

    Args:
        measurements: receive ``costs.ssd``.
        folder: on the disk to measure.
        file_bytes: of the file; in a larger one the disk's own cache answers less.
        seconds: to spend on reading.

    Raises:
        RuntimeFault: the folder cannot be written, or the disk is nearly full.
    """
    file_system = _file_system(folder)
    if file_system in _MEMORY_FILE_SYSTEMS:
        return DiskReport(
            f"no SSD figures: the folder lies on {file_system}, which is memory; name a"
            " folder on a disk",
            None,
        )

    try:
        # Twice, because a disk that is nearly full is slow, and of use to others.
        if shutil.disk_usage(folder).free < 2 * file_bytes:
            raise RuntimeFault(
                f"{folder}: fewer than {2 * file_bytes >> 20} MiB are free; name"
                " another folder"
            )
        with ScratchFolder(folder) as scratch:
            path = scratch / _FILE_NAME
            _write_noise(path, file_bytes)
            with DirectFile(path) as file:
                method = "direct reads around the page cache"
                if not file.direct:
                    why = file.reason
                    method = f"reads through the page cache, dropped after each ({why})"
                core_share = _measure_reads(
                    measurements,
                    file,
                    seconds,
                    f"{method}, {file_system} file of {file_bytes >> 20} MiB",
                )
    except OSError as error:
        raise RuntimeFault(
            f"{folder}: cannot measure reads: {error.strerror or error}; name another"
            " folder"
        ) from None
    return DiskReport(f"{method} on {file_system}", core_share)


def _measure_reads(
    measurements: Measurements, file: DirectFile, seconds: float, source: str
) -> float:
    """Read by size; return the share of the time in which the reading thread kept its
    core busy.
    """
    draws = random.Random(0)  # noqa: S311 - reproducible positions, nothing secret
    # The kind of memory that experts are read into, which decides the speed.
    with HostSlots(1, READ_BYTES[-1]) as slots:
        view = memoryview(slots.record(0).numpy())

        def read(size: int) -> Callable[[int], None]:
            last_block = (file.size_bytes - size) // BLOCK_BYTES
            return lambda _: file.read_into(
                draws.randint(0, last_block) * BLOCK_BYTES, view[:size]
            )

        begin_busy_s = time.thread_time()
        begin_s = time.perf_counter()
        share_s = seconds / len(READ_BYTES)
        by_size = {size: sample(read(size), share_s) for size in READ_BYTES}
        busy_s = time.thread_time() - begin_busy_s
        core_share = busy_s / (time.perf_counter() - begin_s)

    measurements.link(
        "ssd",
        by_size,
        fit_line(by_size),
        f"{source}, one at a time; core busy {core_share:.0%} of a read",
    )
    return core_share


def _write_noise(path: Path, file_bytes: int) -> None:
    """Fill a file with bytes that no disk can compress, and wait until they are
    there.
    """
    noise = np.random.default_rng(0).bytes(_NOISE_BYTES)
    with path.open("wb") as file:
        for _ in range(0, file_bytes, len(noise)):
            file.write(noise)
        file.flush()
        # Else reads would compete with the kernel's own writing.
        os.fsync(file.fileno())


def _file_system(folder: Path) -> str:
    """Name the file system of a folder, by its longest mount point."""
    path = str(folder.resolve())
    mounts = []
    for partition in psutil.disk_partitions(all=True):
        mount = partition.mountpoint
        # With the slash, so that /data is no mount point of /database.
        if path == mount or path.startswith(mount.rstrip("/") + "/"):
            mounts.append((len(mount), partition.fstype))
    return max(mounts, default=(0, "unknown"))[1]

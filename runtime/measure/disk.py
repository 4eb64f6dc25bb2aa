"""Reads of the disk that will hold the experts, around the page cache."""

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
from moesim.runtime.measure.timing import Findings, sample
from moesim.runtime.store.direct_io import BLOCK_BYTES, DirectFile
from moesim.runtime.store.memory import HostTier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB: Final = 1 << 20
READ_BYTES: Final = (128 << 10, 512 << 10, 2 * MIB, 8 * MIB)
_MEMORY_FILE_SYSTEMS: Final = ("tmpfs", "ramfs")
_FILE_NAME: Final = ".moesim-read-test.part"


class DiskReport(NamedTuple):
    """What was read, in words, and the share of a read's time in which it kept its core
    busy; None if none was.
    """

    words: str
    core_share: float | None


def measure_disk(
    findings: Findings, folder: Path, *, file_bytes: int, seconds: float
) -> DiskReport:
    """Write a file of noise, read pieces of it at random places by size, and remove it.

    Args:
        findings: receives ``costs.ssd``.
        folder: on the disk to measure.
        file_bytes: of the file; larger is more honest about the disk's own cache.
        seconds: to spend on reading.

    Raises:
        RuntimeFault: the folder cannot be written, or the disk is nearly full.
    """
    kind = _file_system(folder)
    if kind in _MEMORY_FILE_SYSTEMS:
        return DiskReport(
            f"no SSD figures: the folder lies on {kind}, which is memory; name a folder"
            " on a disk",
            None,
        )
    path = folder / _FILE_NAME
    try:
        if shutil.disk_usage(folder).free < 2 * file_bytes:
            raise RuntimeFault(
                f"{folder}: fewer than {2 * file_bytes >> 20} MiB are free; name"
                " another folder"
            )
        _write_noise(path, file_bytes)
        with DirectFile(path) as file:
            how = "direct reads around the page cache"
            if not file.direct:
                how = (
                    f"reads through the page cache, dropped after each ({file.reason})"
                )
            core_share = _measure_reads(
                findings, file, seconds, f"{how}, {kind} file of {file_bytes >> 20} MiB"
            )
    except OSError as error:
        raise RuntimeFault(
            f"{folder}: cannot measure reads: {error.strerror or error}; name another"
            " folder"
        ) from None
    finally:
        path.unlink(missing_ok=True)
    return DiskReport(f"{how} on {kind}", core_share)


def _measure_reads(
    findings: Findings, file: DirectFile, seconds: float, source: str
) -> float:
    """Read by size; return the share of the time in which the reading thread kept its
    core busy.
    """
    places = random.Random(0)  # noqa: S311 - reproducible places, nothing secret
    with HostTier(
        1, READ_BYTES[-1]
    ) as tier:  # the kind of memory that experts are read into: it decides the speed
        view = memoryview(tier.record(0).numpy())

        def read(size: int) -> Callable[[int], None]:
            last = (file.size_bytes - size) // BLOCK_BYTES
            return lambda _: file.read_into(
                places.randint(0, last) * BLOCK_BYTES, view[:size]
            )

        busy_s = time.thread_time()
        begin_s = time.perf_counter()
        by_size = {
            size: sample(read(size), seconds / len(READ_BYTES)) for size in READ_BYTES
        }
        core_share = (time.thread_time() - busy_s) / (time.perf_counter() - begin_s)
    findings.link(
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
    noise = np.random.default_rng(0).bytes(8 * MIB)
    with path.open("wb") as file:
        for _ in range(0, file_bytes, len(noise)):
            file.write(noise)
        file.flush()
        os.fsync(file.fileno())


def _file_system(folder: Path) -> str:
    """Name the file system of a folder, by its longest mount point."""
    whole = str(folder.resolve())
    mounts = [
        (len(part.mountpoint), part.fstype)
        for part in psutil.disk_partitions(all=True)
        if whole == part.mountpoint
        or whole.startswith(part.mountpoint.rstrip("/") + "/")
    ]
    return max(mounts, default=(0, "unknown"))[1]

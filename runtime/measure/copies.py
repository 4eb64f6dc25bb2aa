"""Measures what brings experts to where they are computed: copies between host
memories, as the host accelerator's links make them; copies to and from an accelerator,
by its own clock; and reads of the disk that will hold the experts, around the page
cache.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import psutil
import torch

from moesim.base.errors import RuntimeFault
from moesim.base.files import ScratchFolder
from moesim.base.units import percent
from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.fit_curves import fit_line
from moesim.runtime.measure.sampling import event_timer, once_s, pool_bytes, sample
from moesim.runtime.store.memory import BLOCK_BYTES, DirectFile, HostSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from moesim.runtime.accelerators import Accelerator
    from moesim.runtime.measure.sampling import Measurements


_KIB: Final = 1 << 10
_MIB: Final = 1 << 20

COPY_BYTES: Final = (64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB)
ACTIVATION_BYTES: Final = (4 * _KIB, 64 * _KIB, _MIB)

_LINK_BYTES: Final = 256 << 20

# Small pieces of a large memory would make a list of millions.
_MOST_PIECES: Final = 4096


def copying(
    target: torch.Tensor, source: torch.Tensor, size: int, *, wait: bool = True
) -> Callable[[int], torch.Tensor]:
    """Return operation number i: copy piece ``i`` of `size` bytes; with `wait` it is
    there on return, else it was launched.
    """
    pieces = min(len(source) // size, _MOST_PIECES)
    pairs = [
        (target[offset : offset + size], source[offset : offset + size])
        for offset in range(0, pieces * size, size)
    ]

    def copy(index: int) -> torch.Tensor:
        to, values = pairs[index % pieces]
        return to.copy_(values, non_blocking=not wait)

    return copy


def measure_copies(
    measurements: Measurements, accelerator: Accelerator, *, seconds: float
) -> None:
    """Measure copies to and from a device by size, page-locked where it needs that, and
    hidden states on their way to the CPU lane and back.
    """
    share_s = seconds / (2 * len(COPY_BYTES) + len(ACTIVATION_BYTES))
    source = f"page-locked copies on {accelerator.device}, its events"
    if accelerator.kind == "host":
        source = "copies by one thread between written host memories"
    by_direction = link_samples(accelerator, COPY_BYTES, share_s, page_locked=True)
    for link, by_size in by_direction.items():
        measurements.link(link, by_size, f"{source}, each piece in turn")

    nbytes = _link_bytes(accelerator)
    host, there = link_memories(accelerator, nbytes, page_locked=True)

    def there_and_back(size: int) -> Callable[[int], None]:
        back = copying(host, there, size, wait=False)
        forth = copying(there, host, size, wait=False)

        def work(index: int) -> None:
            back(index)
            forth(index + 1)
            accelerator.synchronize()

        return work

    # By the host's clock, since the CPU lane waits for its hidden states there.
    by_bytes = {
        2 * size: sample(there_and_back(size), share_s) for size in ACTIVATION_BYTES
    }
    measurements.put_fit(
        paths.link(paths.ACTIVATION),
        fit_line(by_bytes),
        f"line through hidden states to the CPU lane and its result back, by bytes:"
        f" {source}",
    )


def _link_bytes(accelerator: Accelerator) -> int:
    """Bytes of both ends of a link, used piece by piece, so that no copy finds its
    bytes in a cache.
    """
    return max(_LINK_BYTES, pool_bytes(accelerator))


def link_memories(
    accelerator: Accelerator, nbytes: int, *, page_locked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return written memory of the host and of a device: other memory is not read, but
    made up.
    """
    host = torch.ones(nbytes, dtype=torch.uint8)
    if page_locked:
        host = accelerator.page_locked(host)
    return host, torch.ones(nbytes, dtype=torch.uint8, device=accelerator.device)


def link_samples(
    accelerator: Accelerator,
    sizes: Sequence[int],
    seconds: float,
    *,
    page_locked: bool,
) -> dict[str, dict[int, np.ndarray]]:
    """Time copies to a device and back: lane class -> size -> seconds of each, float64
    [n].

    Args:
        accelerator: whose link it is.
        sizes: bytes, ascending.
        seconds: to spend on each size and direction.
        page_locked: copies run by themselves, and the device's clock tells their time;
            one of pageable memory keeps the host busy, whose clock counts.
    """
    once = event_timer(accelerator) if page_locked else once_s
    nbytes = _link_bytes(accelerator)
    host, there = link_memories(accelerator, nbytes, page_locked=page_locked)
    return {
        link: {
            size: sample(
                copying(target, source, size, wait=not page_locked), seconds, once=once
            )
            for size in sizes
        }
        for link, target, source in (("h2d", there, host), ("d2h", host, there))
    }


READ_BYTES: Final = (128 * _KIB, 512 * _KIB, 2 * _MIB, 8 * _MIB)
_NOISE_BYTES: Final = 8 * _MIB
_MEMORY_FILE_SYSTEMS: Final = ("tmpfs", "ramfs")
_FILE_NAME: Final = "noise"


class DiskReport(NamedTuple):
    """The way in which reads were measured.

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

    with noise_file(folder, file_bytes) as file:
        method = "direct reads around the page cache"
        if not file.direct:
            method = f"reads through the page cache, dropped after each ({file.reason})"
        core_share = _measure_reads(
            measurements,
            file,
            seconds,
            f"{method}, {file_system} file of {file_bytes >> 20} MiB",
        )
    return DiskReport(f"{method} on {file_system}", core_share)


@contextmanager
def noise_file(folder: Path, file_bytes: int) -> Iterator[DirectFile]:
    """Have an open file of noise in a folder, which goes afterwards.

    Raises:
        RuntimeFault: the folder cannot be written, or the disk is nearly full.
    """
    try:
        # Twice, because a disk that is nearly full is slow, and of use to others; some
        # file systems in memory count nothing.
        usage = shutil.disk_usage(folder)
        if usage.total and usage.free < 2 * file_bytes:
            raise RuntimeFault(
                f"{folder}: fewer than {2 * file_bytes >> 20} MiB are free; name"
                " another folder"
            )
        with ScratchFolder(folder) as scratch:
            path = scratch / _FILE_NAME
            _write_noise(path, file_bytes)
            with DirectFile(path) as file:
                yield file
    except OSError as error:
        raise RuntimeFault(
            f"{folder}: cannot measure reads: {error.strerror or error}; name another"
            " folder"
        ) from None


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
        f"{source}, one at a time; core busy {percent(core_share, 0)} of a read",
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

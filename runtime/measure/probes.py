"""Probes memories and links alone: what reading, copying and both at once reach.

Costs say what an expert takes through this project's own kernels. Other engines have
other kernels but the same memory, so `moesim advise` starts from these rates.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from moesim.hwprofiles import paths
from moesim.runtime.accelerators.here import accelerator_here
from moesim.runtime.measure.timing import sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.runtime.accelerators.accelerator import Accelerator
    from moesim.runtime.measure.measurements import Measurements

# Larger than the caches of processors that people own, V-Cache included.
READ_BYTES: Final = 256 << 20
DEVICE_READ_BYTES: Final = 1 << 30
# Copies beside reads go on until the reads have been timed so often.
_BESIDE_READS: Final = 8


def measure_probes(measurements: Measurements, cores: int, *, seconds: float) -> None:
    """Measure read rates of host memory by threads and, where there is a GPU, copies,
    its own memory, and reads and copies at the same time.

    Args:
        measurements: gets the rates.
        cores: that may be used.
        seconds: for all of it.
    """
    words = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    counts = thread_counts(cores)
    accelerator = accelerator_here()
    share_s = seconds / (len(counts) + (0 if accelerator is None else 5))

    for threads in counts:
        with _threads(threads):
            times_s = sample(lambda _index: words.sum(), share_s)
        measurements.number(
            paths.host_read(threads),
            READ_BYTES / np.asarray(times_s),
            f"sum of {READ_BYTES >> 20} MiB of integers, {threads} threads",
        )
    if accelerator is not None:
        _measure_links(measurements, accelerator, share_s)
        _measure_beside(measurements, accelerator, words, cores)


def thread_counts(cores: int) -> list[int]:
    """Powers of two up to the cores, and the cores."""
    powers = [1 << power for power in range(cores.bit_length())]
    return sorted({count for count in (*powers, cores) if count <= cores})


def _measure_links(
    measurements: Measurements, accelerator: Accelerator, share_s: float
) -> None:
    """Copies from page-locked and from ordinary memory, and reads on the device."""
    device = accelerator.device
    target = torch.empty(READ_BYTES, dtype=torch.uint8, device=device)
    for path, page_lock in (
        (paths.LINK_PAGE_LOCKED, True),
        (paths.LINK_PAGEABLE, False),
    ):
        source = torch.ones(READ_BYTES, dtype=torch.uint8)
        if page_lock:
            source = accelerator.page_locked(source)

        def copy(_index: int, source: torch.Tensor = source) -> None:
            target.copy_(source, non_blocking=True)
            accelerator.synchronize()

        measurements.number(
            path,
            READ_BYTES / np.asarray(sample(copy, share_s)),
            f"copies of {READ_BYTES >> 20} MiB to the GPU, page-locked: {page_lock}",
        )

    words = torch.ones(DEVICE_READ_BYTES // 8, dtype=torch.int64, device=device)

    def read(_index: int) -> None:
        words.sum()
        accelerator.synchronize()

    measurements.number(
        paths.DEVICE_READ,
        DEVICE_READ_BYTES / np.asarray(sample(read, share_s)),
        f"sum of {DEVICE_READ_BYTES >> 20} MiB of integers on the GPU",
    )


def _measure_beside(
    measurements: Measurements,
    accelerator: Accelerator,
    words: torch.Tensor,
    cores: int,
) -> None:
    """Reads by the CPU while copies run, and the copies meanwhile."""
    source = accelerator.page_locked(torch.ones(READ_BYTES, dtype=torch.uint8))
    target = torch.empty_like(source, device=accelerator.device)
    reads = []
    copies = []
    stream = accelerator.new_stream()

    with _threads(cores):
        for _ in range(_BESIDE_READS):
            begin = accelerator.event(asleep=False)
            end = accelerator.event(asleep=False)
            # Enough copies that the link is busy throughout the reads.
            with accelerator.on(stream):
                begin.record(stream)
                for _copy in range(4):
                    target.copy_(source, non_blocking=True)
                end.record(stream)
            begin_s = time.perf_counter()
            passes = 0
            while not end.query():
                words.sum()
                passes += 1
            elapsed_s = time.perf_counter() - begin_s
            # Events report milliseconds.
            copies.append(4 * READ_BYTES / (float(begin.elapsed_time(end)) * 1e-3))
            reads.append(passes * READ_BYTES / elapsed_s)

    source_words = f"{cores} threads sum integers while copies run"
    measurements.number(paths.HOST_BESIDE_LINK, np.asarray(reads), source_words)
    measurements.number(paths.LINK_BESIDE_HOST, np.asarray(copies), source_words)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use so many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

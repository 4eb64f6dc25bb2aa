"""Measures how much lanes slow each other down while they work side by side, and what
memories and links reach alone: reading, copying, and both at once.

Costs say what an expert takes through this project's own kernels. Other engines have
other kernels but the same memory, so `moesim advise` starts from these rates.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable  # noqa: TC003 - a field's type
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from moesim.hwprofiles import paths
from moesim.runtime.accelerators import HOST
from moesim.runtime.measure.copies import copying, link_memories
from moesim.runtime.measure.experts import ExpertPool
from moesim.runtime.measure.sampling import pool_bytes, sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moesim.runtime.accelerators import Accelerator
    from moesim.runtime.measure.experts import Size
    from moesim.runtime.measure.sampling import Measurements

_ROUNDS: Final = 6
"""All of six hold their median in 97 of 100 cases; all of three in 75."""
_FEWEST: Final = 3


class LaneWork(NamedTuple):
    """Work of a lane while others are measured: operation i, on so many threads."""

    threads: int
    run: Callable[[int], object]


@contextmanager
def lane_work(
    size: Size,
    dtype: torch.dtype,
    accelerator: Accelerator,
    cpu_threads: int,
) -> Iterator[dict[str, LaneWork]]:
    """Have what the CPU lane, the accelerator and its link do: an expert on one token,
    and the copy of one.

    Args:
        size, dtype: of the experts.
        accelerator: whose work its host waits for.
        cpu_threads: of the CPU lane.
    """
    # Pools of their own: shared weights would come from a shared cache.
    experts, others = (
        ExpertPool(size, dtype, accelerator=where) for where in (HOST, accelerator)
    )
    nbytes = experts.layout.expert_bytes
    compute = awaited(accelerator, others.work(1))
    copy = awaited(accelerator, device_copy(accelerator, nbytes))
    try:
        yield {
            "cpu": LaneWork(cpu_threads, experts.work(1)),
            "gpu": LaneWork(1, compute),
            "h2d": LaneWork(1, copy),
        }
    finally:
        experts.close()
        others.close()


def measure_contention(
    measurements: Measurements,
    work: Mapping[str, LaneWork],
    pairs: list[tuple[str, str]],
    *,
    seconds: float,
) -> None:
    """Measure each pair (victim, other) of lane classes: the victim's operation alone
    and beside the other's.

    Alone and beside take turns, so that a drifting machine slows both. Means, not
    medians: work that stands still now and then gets less done, and that is what a rate
    is.

    Args:
        measurements: receive ``contention.<victim>.<other>``.
        work: lane class -> what it does.
        pairs: of lane classes on different workers.
        seconds: to spend.
    """
    share_s = seconds / (2 * _ROUNDS * len(pairs))
    for victim, other in pairs:
        ratios = [slowdown(work[victim], work[other], share_s) for _ in range(_ROUNDS)]
        measurements.number(
            f"contention.{victim}.{other}",
            # Below 1 is noise: no work gets faster beside other work.
            np.maximum(ratios, 1.0),
            f"{victim} beside {other}: mean time over mean time alone, in {_ROUNDS}"
            " rounds of both",
        )


def slowdown(victim: LaneWork, other: LaneWork, seconds: float) -> float:
    """Return the victim's mean time beside the other's work over that alone."""
    torch.set_num_threads(victim.threads)
    alone_s = float(np.mean(sample(victim.run, seconds, fewest=_FEWEST)))

    stop = threading.Event()
    running = threading.Event()
    errors: list[Exception] = []

    def neighbour() -> None:
        try:
            torch.set_num_threads(other.threads)
            for index in count():
                other.run(index)
                running.set()
                if stop.is_set():
                    return
        except Exception as error:  # noqa: BLE001 - raised by the waiting thread below
            errors.append(error)
            # Else the measuring thread would wait for ever.
            running.set()

    thread = threading.Thread(target=neighbour, name="measured-neighbour", daemon=True)
    thread.start()
    try:
        running.wait()
        # Again: the neighbour may have changed the setting of all threads.
        torch.set_num_threads(victim.threads)
        beside_s = float(np.mean(sample(victim.run, seconds, fewest=_FEWEST)))
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
    return beside_s / alone_s


# Larger than the caches of processors that people own, V-Cache included.
READ_BYTES: Final = 256 << 20
DEVICE_READ_BYTES: Final = 1 << 30
# Copies beside reads go on until the reads have been timed so often.
_BESIDE_READS: Final = 8


def measure_probes(
    measurements: Measurements, cores: int, accelerator: Accelerator, *, seconds: float
) -> None:
    """Measure read rates of host memory by threads and, where there is a GPU, copies,
    its own memory, and reads and copies at the same time.

    Args:
        measurements: gets the rates.
        cores: that may be used.
        accelerator: that there is.
        seconds: for all of it.
    """
    words = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    counts = thread_counts(cores)
    has_card = accelerator.kind != "host"
    share_s = seconds / (len(counts) + 5 * has_card)

    for threads in counts:
        with torch_threads(threads):
            times_s = sample(lambda _index: words.sum(), share_s)
        measurements.number(
            paths.host_read(threads),
            READ_BYTES / np.asarray(times_s),
            f"sum of {READ_BYTES >> 20} MiB of integers, {threads} threads",
        )
    if has_card:
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
    for path, page_locked in (
        (paths.LINK_PAGE_LOCKED, True),
        (paths.LINK_PAGEABLE, False),
    ):
        host, there = link_memories(accelerator, READ_BYTES, page_locked=page_locked)
        copy = awaited(accelerator, copying(there, host, READ_BYTES, wait=False))
        measurements.number(
            path,
            READ_BYTES / np.asarray(sample(copy, share_s)),
            f"copies of {READ_BYTES >> 20} MiB to the GPU, page-locked: {page_locked}",
        )

    words = torch.ones(
        DEVICE_READ_BYTES // 8, dtype=torch.int64, device=accelerator.device
    )
    read = awaited(accelerator, lambda _index: words.sum())
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
    source, target = link_memories(accelerator, READ_BYTES, page_locked=True)
    reads = []
    copies = []
    stream = accelerator.new_stream()

    with torch_threads(cores):
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
            # One at least, also where the copies have ended meanwhile.
            while not passes or not end.query():
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
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_copy(accelerator: Accelerator, nbytes: int) -> Callable[[int], None]:
    """Return operation number i: launch a copy of so many bytes to a device, of as many
    in turn as `ExpertPool` has.
    """
    total_bytes = pool_bytes(accelerator, 2 * nbytes)
    host, there = link_memories(accelerator, total_bytes, page_locked=True)
    launch = copying(there, host, nbytes, wait=False)
    stream = accelerator.new_stream()

    def copy(index: int) -> None:
        with accelerator.on(stream):
            launch(index)

    return copy


def awaited(
    accelerator: Accelerator, launch: Callable[[int], object]
) -> Callable[[int], None]:
    """Return an operation that launches work on a device and waits until it is done."""

    def work(index: int) -> None:
        launch(index)
        accelerator.synchronize()

    return work

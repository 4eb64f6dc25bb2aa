"""What lanes cost each other: hand-offs between threads, and work that slows other
work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable  # noqa: TC003 - a field's type
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from moesim.runtime.measure.timing import Findings, sample

if TYPE_CHECKING:
    from collections.abc import Mapping

_OPERATIONS: Final = 64
_ROUNDS: Final = 3


class LaneWork(NamedTuple):
    """What a lane does while others are measured: operation number i, on so many
    threads.
    """

    threads: int
    run: Callable[[int], object]


def measure_dispatch(findings: Findings, *, seconds: float) -> None:
    """Measure a hand-off of a list of empty operations to a waiting thread, and the way
    back.
    """
    inbox: SimpleQueue[list[Callable[[], None]] | None] = SimpleQueue()
    outbox: SimpleQueue[tuple[int, int]] = SimpleQueue()

    def lane() -> None:
        while (operations := inbox.get()) is not None:
            begin = time.perf_counter_ns()
            spans = []
            for operation in operations:
                start = time.perf_counter_ns()
                operation()
                spans.append((start, time.perf_counter_ns()))
            outbox.put((begin, time.perf_counter_ns()))

    thread = threading.Thread(target=lane, name="measured-lane", daemon=True)
    thread.start()
    first: list[float] = []
    each: list[float] = []
    join: list[float] = []
    operations: list[Callable[[], None]] = [_nothing] * _OPERATIONS
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(first) < 20:
        # Planning: the lane has gone to sleep meanwhile.
        time_for_other_work = time.perf_counter() + 2e-4
        while time.perf_counter() < time_for_other_work:
            pass
        handed = time.perf_counter_ns()
        inbox.put(operations)
        begin, end = outbox.get()
        back = time.perf_counter_ns()
        first.append(begin - handed)
        each.append((end - begin) / _OPERATIONS)
        join.append(back - end)
    inbox.put(None)
    thread.join()
    for key, nanoseconds, words in (
        (
            "first_op_s",
            first,
            "from handing a list of operations to a sleeping thread until it starts",
        ),
        (
            "per_op_s",
            each,
            f"each of {_OPERATIONS} empty operations with its two time stamps",
        ),
        ("join_s", join, "from the thread's end until the waiting thread runs again"),
    ):
        findings.number(
            f"costs.dispatch.{key}", np.asarray(nanoseconds[5:]) * 1e-9, words
        )


def _nothing() -> None:
    """Do nothing: the operation is free, its hand-off is not."""


def measure_contention(
    findings: Findings,
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
        findings: receives ``contention.<victim>.<other>``.
        work: lane class -> what it does.
        pairs: of lane classes on different workers.
        seconds: to spend.
    """
    for victim, other in pairs:
        share_s = seconds / (2 * _ROUNDS * len(pairs))
        ratios = [_slowdown(work[victim], work[other], share_s) for _ in range(_ROUNDS)]
        findings.number(
            f"contention.{victim}.{other}",
            np.maximum(ratios, 1.0),
            f"{victim} beside {other}: mean time over mean time alone, in {_ROUNDS}"
            " rounds of both",
        )


def _slowdown(victim: LaneWork, other: LaneWork, seconds: float) -> float:
    torch.set_num_threads(victim.threads)
    alone = float(np.mean(sample(victim.run, seconds, fewest=3)))
    stop = threading.Event()
    running = threading.Event()
    failed: list[Exception] = []

    def neighbour() -> None:
        try:
            torch.set_num_threads(other.threads)
            for index in count():
                other.run(index)
                running.set()
                if stop.is_set():
                    return
        except Exception as error:  # noqa: BLE001 - handed to the waiting thread below
            failed.append(error)
            running.set()

    thread = threading.Thread(target=neighbour, name="measured-neighbour", daemon=True)
    thread.start()
    try:
        running.wait()
        torch.set_num_threads(victim.threads)
        beside = float(np.mean(sample(victim.run, seconds, fewest=3)))
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]
    return beside / alone

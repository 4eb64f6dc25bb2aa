"""What lanes cost each other: hand-offs between threads, and work that slows other work."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np

from runtime.measure_timing import Findings, once_s, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_OPERATIONS: Final = 64


def measure_dispatch(findings: Findings, *, seconds: float) -> None:
    """Measure a hand-off of a list of empty operations to a waiting thread, and the way back."""
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
    first, each, join = [], [], []
    operations: list[Callable[[], None]] = [_nothing] * _OPERATIONS
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(first) < 20:
        time_for_other_work = time.perf_counter() + 2e-4  # planning: the lane has gone to sleep meanwhile
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
        ("first_op_s", first, "from handing a list of operations to a sleeping thread until it starts"),
        ("per_op_s", each, f"each of {_OPERATIONS} empty operations with its two time stamps"),
        ("join_s", join, "from the thread's end until the waiting thread runs again"),
    ):
        findings.number(f"costs.dispatch.{key}", np.asarray(nanoseconds[5:]) * 1e-9, words)


def _nothing() -> None:
    """Do nothing: the operation is free, its hand-off is not."""


def measure_contention(
    findings: Findings, work: Mapping[str, Callable[[int], object]], pairs: list[tuple[str, str]], *, seconds: float
) -> None:
    """Measure each pair (victim, other) of lane classes: the victim's operation alone and beside the other's.

    Alone and beside take turns, so that a drifting machine slows both.

    Args:
        findings: receives ``contention.<victim>.<other>``.
        work: lane class -> operation number i.
        pairs: of lane classes on different workers.
        seconds: to spend.
    """
    for victim, other in pairs:
        ratios = [
            _slowdown(work[victim], work[other], seconds / (2 * _ROUNDS * len(pairs))) for _ in range(_ROUNDS)
        ]
        findings.number(
            f"contention.{victim}.{other}",
            np.maximum(ratios, 1.0),
            f"{victim} beside {other}: median time over median time alone, in {_ROUNDS} rounds of both",
        )


_ROUNDS: Final = 3


def _slowdown(victim: Callable[[int], object], other: Callable[[int], object], seconds: float) -> float:
    alone = float(np.median(sample(victim, seconds, fewest=3)))
    stop, running = threading.Event(), threading.Event()

    def neighbour() -> None:
        index = 0
        while not stop.is_set():
            once_s(other, index)
            index += 1
            running.set()

    thread = threading.Thread(target=neighbour, name="measured-neighbour", daemon=True)
    thread.start()
    try:
        running.wait()
        beside = float(np.median(sample(victim, seconds, fewest=3)))
    finally:
        stop.set()
        thread.join()
    return beside / alone

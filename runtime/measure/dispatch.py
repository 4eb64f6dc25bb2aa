"""Measures hand-offs between threads: what it costs to give a lane its operations."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.runtime.measure.measurements import Measurements

_OPERATIONS: Final = 64
_FEWEST: Final = 20

# The first hand-offs map pages and meet cold caches.
_WARM_UP: Final = 5

# About as long as planning a layer: meanwhile the lane's thread goes to sleep.
_PLANNING_S: Final = 2e-4

_Operations: TypeAlias = "list[Callable[[], None]] | None"
_SOURCES: Final = {
    "first_op_s": "from handing a list of operations to a sleeping thread until it"
    " starts",
    "per_op_s": f"each of {_OPERATIONS} empty operations with its two time stamps",
    "join_s": "from the thread's end until the waiting thread runs again",
}


def measure_dispatch(measurements: Measurements, *, seconds: float) -> None:
    """Measure a hand-off of a list of empty operations to a waiting thread, and the way
    back.
    """
    inbox: SimpleQueue[_Operations] = SimpleQueue()
    outbox: SimpleQueue[tuple[int, int]] = SimpleQueue()
    thread = threading.Thread(
        target=_lane, args=(inbox, outbox), name="measured-lane", daemon=True
    )
    thread.start()

    times_ns: dict[str, list[float]] = {key: [] for key in _SOURCES}
    operations: list[Callable[[], None]] = [_nothing] * _OPERATIONS
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(times_ns["first_op_s"]) < _FEWEST:
        _busy_wait(_PLANNING_S)
        handed_ns = time.perf_counter_ns()
        inbox.put(operations)
        started_ns, ended_ns = outbox.get()
        joined_ns = time.perf_counter_ns()
        times_ns["first_op_s"].append(started_ns - handed_ns)
        times_ns["per_op_s"].append((ended_ns - started_ns) / _OPERATIONS)
        times_ns["join_s"].append(joined_ns - ended_ns)
    inbox.put(None)
    thread.join()

    for key, source in _SOURCES.items():
        samples = np.asarray(times_ns[key][_WARM_UP:]) * 1e-9
        measurements.number(f"costs.dispatch.{key}", samples, source)


def _lane(
    inbox: SimpleQueue[_Operations], outbox: SimpleQueue[tuple[int, int]]
) -> None:
    """Do operations as a lane does, two time stamps each, until None comes."""
    while (operations := inbox.get()) is not None:
        begin_ns = time.perf_counter_ns()
        spans = []
        for operation in operations:
            start_ns = time.perf_counter_ns()
            operation()
            spans.append((start_ns, time.perf_counter_ns()))
        outbox.put((begin_ns, time.perf_counter_ns()))


def _busy_wait(seconds: float) -> None:
    """Keep this thread's core busy, as planning does."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def _nothing() -> None:
    """Do nothing: the operation is free, its hand-off is not."""

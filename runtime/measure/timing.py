"""Times one operation, alone, many times, each time on other memory.

A loop over one small buffer measures the cache, a loop over memory that was never
written measures the zero page, and a single timing measures an accident.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Final, TypeAlias

import numpy as np

FEWEST: Final = 7
MOST: Final = 400

Operation: TypeAlias = Callable[[int], object]
"""Does operation number i."""

Timer: TypeAlias = Callable[[Operation, int], float]
"""Does operation number i and returns its seconds."""


def once_s(work: Operation, index: int) -> float:
    """Time operation `index`, in seconds."""
    begin_ns = time.perf_counter_ns()
    work(index)
    return (time.perf_counter_ns() - begin_ns) * 1e-9


def sample(
    work: Operation,
    seconds: float,
    *,
    fewest: int = FEWEST,
    most: int = MOST,
    once: Timer = once_s,
) -> np.ndarray:
    """Time `work(0)`, `work(1)`, … one by one until `seconds` have passed; two runs
    before do not count.

    Args:
        work: does operation number i, on other memory than the one before.
        seconds: to spend, roughly; `fewest` runs are made whatever they take.
        fewest: least measurements.
        most: most measurements.
        once: how one operation is timed: on this thread, or by a device's own clock.

    Returns:
        Seconds of each run, float64 [n].
    """
    # The first runs compile, initialise libraries and map pages.
    work(0)
    work(1)

    # Seconds bound a slow operation, `most` a fast one.
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    for index in count(2):
        times.append(once(work, index))
        enough = len(times) >= fewest and time.perf_counter() >= end_s
        if enough or len(times) >= most:
            break
    return np.asarray(times, dtype=np.float64)

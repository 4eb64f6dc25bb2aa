"""Times one operation, alone, many times, each time on other memory, and notes what was
found in the form of a hardware profile's tables.

A loop over one small buffer measures the cache, a loop over memory that was never
written measures the zero page, and a single timing measures an accident.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import measured, measured_curve
from moesim.hwprofiles.calibration.fit_curves import Entries, fit_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.hwprofiles.calibration.estimates import FitReport
    from moesim.hwprofiles.calibration.fit_curves import Roofline
    from moesim.hwprofiles.schema import ReferenceExpert
    from moesim.runtime.accelerators import Accelerator

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
    once: Timer = once_s,
) -> np.ndarray:
    """Time `work(0)`, `work(1)`, … one by one until `seconds` have passed; two runs
    before do not count.

    Args:
        work: does operation number i, on other memory than the one before.
        seconds: to spend, roughly; `fewest` runs are made whatever they take.
        fewest: least measurements.
        once: how one operation is timed: on this thread, or by a device's own clock.

    Returns:
        Seconds of each run, float64 [n].
    """
    # The first runs compile, initialise libraries and map pages.
    work(0)
    work(1)

    # Seconds bound a slow operation, `MOST` a fast one.
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    for index in count(2):
        times.append(once(work, index))
        enough = len(times) >= fewest and time.perf_counter() >= end_s
        if enough or len(times) >= MOST:
            break
    return np.asarray(times, dtype=np.float64)


def event_timer(accelerator: Accelerator) -> Timer:
    """Return a timer of one operation on the accelerator's current stream, by its own
    clock.

    The time between an event before and one after holds what the lane would hold: the
    kernels and the gaps between their launches, without the host's way there and back.
    """
    begin = accelerator.event(asleep=False)
    end = accelerator.event(asleep=False)

    def once(work: Operation, index: int) -> float:
        stream = accelerator.current_stream()
        begin.record(stream)
        work(index)
        end.record(stream)
        end.synchronize()
        # Events report milliseconds.
        return float(begin.elapsed_time(end)) * 1e-3

    return once


_POOL_CACHES: Final = 4
"""A pool is so many times what caches hold. Read in turn, even a cache that protects a
part of what passes through it then answers a quarter at most.
"""
_POOL_SHARE: Final = 8
"""A pool takes at most this part of the free memory."""


def pool_bytes(accelerator: Accelerator, experts_bytes: int = 0) -> int:
    """Bytes of a device's memory that a measurement cycles through: four times all
    caches, an eighth of free memory at most, two experts at least.
    """
    limit_bytes = accelerator.total_bytes // _POOL_SHARE
    pool = min(_POOL_CACHES * accelerator.cache_bytes, limit_bytes)
    return max(pool, 2 * experts_bytes)


class Measurements(Entries):
    """Measurements that were made so far.

    Args:
        date: of all of it, ISO.
    """

    def __init__(self, date: str) -> None:
        super().__init__(date, seed=0)

    def number(self, path: str, samples: np.ndarray, source: str) -> None:
        """Note repeated measurements of one number."""
        self.numbers[path] = measured(samples, source=source, date=self.date)

    def report(self, name: str, report: FitReport) -> None:
        """Note how far a fit missed points it had not seen."""
        self.fit[name] = {key: round(of, 6) for key, of in report.as_table().items()}

    def link(self, name: str, samples: Mapping[int, np.ndarray], source: str) -> None:
        """Note a link: its curve by bytes, its latency and its bandwidth."""
        self.curves[paths.points(name)] = measured_curve(
            samples, "bytes", source=source, date=self.date
        )
        line = fit_line(samples)
        through = f"line through the medians by size: {source}"
        self.put_fit(paths.link(name), line, through)
        self.report(name, line.report)

    def roofline(self, name: str, fit: Roofline, source: str) -> None:
        """Note a roofline's three constants."""
        self.put_fit(paths.roofline(name), fit, source)
        self.report(name, fit.report)

    def points(
        self,
        name: str,
        samples: Mapping[int, np.ndarray],
        reference: ReferenceExpert,
        source: str,
    ) -> None:
        """Note an expert's curve by tokens."""
        self.curves[paths.points(name)] = measured_curve(
            samples, "tokens", source=source, date=self.date, reference=reference
        )

"""How a measurement is repeated, and where its result goes.

One operation, timed alone, many times, each time on other memory: a loop over one small
buffer measures the cache, a loop over memory that nobody wrote measures the zero page,
and a single timing measures an accident.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np
from moesim.hwprofiles.calibration.estimates import (
    estimated,
    inverse,
    measured,
    measured_curve,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moesim.hwprofiles.calibration.estimates import Estimate, FitReport
    from moesim.hwprofiles.calibration.fit_curves import Line, Roofline
    from moesim.hwprofiles.schema import Curve, Quantity, ReferenceExpert

FEWEST: Final = 7
MOST: Final = 400


def once_s(work: Callable[[int], object], index: int) -> float:
    """Time operation `index`, in seconds."""
    begin = time.perf_counter_ns()
    work(index)
    return (time.perf_counter_ns() - begin) * 1e-9


def sample(
    work: Callable[[int], object],
    seconds: float,
    *,
    fewest: int = FEWEST,
    most: int = MOST,
    once: Callable[[Callable[[int], object], int], float] = once_s,
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
    work(0)
    work(1)
    times: list[float] = []
    until = time.perf_counter() + seconds
    for index in count(2):
        times.append(once(work, index))
        if len(times) >= most or (
            len(times) >= fewest and time.perf_counter() >= until
        ):
            break
    return np.asarray(times, dtype=np.float64)


@dataclass
class Findings:
    """What has been measured so far, in the form of a profile's tables."""

    date: str
    numbers: dict[str, Quantity] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    fit: dict[str, dict[str, float]] = field(default_factory=dict)

    def number(self, path: str, samples: np.ndarray, source: str) -> None:
        """Note repeated measurements of one number."""
        self.numbers[path] = measured(samples, source=source, date=self.date)

    def estimate(
        self, path: str, estimate: Estimate, samples: int, source: str
    ) -> None:
        """Note a fitted constant."""
        self.numbers[path] = estimated(
            estimate, samples=samples, source=source, date=self.date
        )

    def report(self, name: str, report: FitReport) -> None:
        """Note how far a fit missed points it had not seen."""
        self.fit[name] = {
            key: round(float(value), 6) for key, value in report._asdict().items()
        }

    def link(
        self, name: str, samples: Mapping[int, np.ndarray], line: Line, source: str
    ) -> None:
        """Note a link: its curve by bytes, its latency and its bandwidth."""
        self.curves[f"costs.{name}.points"] = measured_curve(
            samples, "bytes", source=source, date=self.date
        )
        self.line(
            f"costs.{name}",
            ("latency_s", "bytes_per_s"),
            line,
            f"line through the medians by size: {source}",
        )
        self.report(name, line.report)

    def line(self, path: str, keys: tuple[str, str], line: Line, source: str) -> None:
        """Note a line's two constants; the second as a rate where its name says
        ``_per_s``.
        """
        slope = inverse(line.slope_s) if keys[1].endswith("_per_s") else line.slope_s
        self.estimate(f"{path}.{keys[0]}", line.base_s, line.report.samples, source)
        self.estimate(f"{path}.{keys[1]}", slope, line.report.samples, source)

    def roofline(self, name: str, fit: Roofline, source: str) -> None:
        """Note a roofline's three constants."""
        for key in ("overhead_s", "bytes_per_s", "flops_per_s"):
            self.estimate(
                f"costs.{name}.{key}", getattr(fit, key), fit.report.samples, source
            )
        self.report(name, fit.report)

    def points(
        self,
        name: str,
        samples: Mapping[int, np.ndarray],
        reference: ReferenceExpert,
        source: str,
    ) -> None:
        """Note an expert's curve by tokens."""
        self.curves[f"costs.{name}.points"] = measured_curve(
            samples, "tokens", source=source, date=self.date, reference=reference
        )

"""Collects what was measured, in the form of a hardware profile's tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesim.hwprofiles.calibration.estimates import (
    estimated,
    inverse,
    measured,
    measured_curve,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from moesim.hwprofiles.calibration.estimates import Estimate, FitReport
    from moesim.hwprofiles.calibration.fit_curves import Line, Roofline
    from moesim.hwprofiles.schema import Curve, Quantity, ReferenceExpert


@dataclass
class Measurements:
    """What has been measured so far.

    Attributes:
        date: of all of it, ISO.
        numbers: path in the profile -> quantity.
        curves: path in the profile -> curve.
        fit: name of a fit -> its errors.
    """

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
        base_key, slope_key = keys
        # A fit gives seconds per byte; a profile holds bytes per second.
        is_rate = slope_key.endswith("_per_s")
        slope = inverse(line.slope_s) if is_rate else line.slope_s
        samples = line.report.samples
        self.estimate(f"{path}.{base_key}", line.base_s, samples, source)
        self.estimate(f"{path}.{slope_key}", slope, samples, source)

    def roofline(self, name: str, fit: Roofline, source: str) -> None:
        """Note a roofline's three constants."""
        samples = fit.report.samples
        for key in ("overhead_s", "bytes_per_s", "flops_per_s"):
            self.estimate(f"costs.{name}.{key}", getattr(fit, key), samples, source)
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

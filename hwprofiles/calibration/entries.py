"""Collects the entries of a profile that a fit produces, part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import (
    FitReport,
    estimated,
    interval_around,
)
from moesim.hwprofiles.calibration.points import LEAST_SAMPLES
from moesim.hwprofiles.calibration.robust import clipped_mean, resampled
from moesim.hwprofiles.schema import Curve, Quantity

if TYPE_CHECKING:
    from moesim.hwprofiles.calibration.estimates import Estimate
    from moesim.hwprofiles.calibration.fit_curves import Roofline


class Entries:
    """Numbers, curves and residuals by dotted path, and the source of randomness that
    all intervals are resampled from.

    Args:
        date: day of the measurement, ISO 8601.
        seed: of the resampling.

    Attributes:
        numbers: path -> number.
        curves: path -> curve.
        fit: name of a cost -> residuals.
        date: as given.
        rng: one stream for all parts of the fit, so their order decides the draws.
    """

    def __init__(self, date: str, seed: int) -> None:
        self.date = date
        self.rng = np.random.default_rng(seed)
        self.numbers: dict[str, Quantity] = {}
        self.curves: dict[str, Curve] = {}
        self.fit: dict[str, dict[str, float]] = {}

    def put(
        self,
        path: str,
        value: float,
        source: str,
        *,
        samples: int,
        spread: float,
        interval: tuple[float, float],
        quantiles: tuple[float, ...] = (),
    ) -> None:
        """Enter a number; its interval is widened to hold it."""
        self.numbers[path] = Quantity(
            value,
            "measured",
            source,
            samples=samples,
            spread=spread,
            date=self.date,
            interval=interval_around(value, *interval),
            quantiles=quantiles,
        )

    def put_mean(self, path: str, seconds: np.ndarray, source: str) -> None:
        """Enter the mean of samples, never below zero."""
        estimate = resampled(seconds, self.rng)
        # Differences of gaps can come out negative; seconds of a machine cannot.
        self.put(
            path,
            max(0.0, estimate.value),
            source,
            samples=len(seconds),
            spread=estimate.spread,
            interval=(max(0.0, estimate.interval[0]), estimate.interval[1]),
        )

    def put_estimate(
        self, path: str, estimate: Estimate, *, samples: int, source: str
    ) -> None:
        """Enter a fitted constant."""
        self.numbers[path] = estimated(
            estimate, samples=samples, source=source, date=self.date
        )

    def put_roofline(
        self, part: str, roof: Roofline, *, samples: int, source: str
    ) -> None:
        """Enter the constants of a roofline."""
        constants = paths.roofline(part)
        for path, estimate in (
            (constants.overhead_s, roof.overhead_s),
            (constants.bytes_per_s, roof.bytes_per_s),
            (constants.flops_per_s, roof.flops_per_s),
        ):
            self.put_estimate(path, estimate, samples=samples, source=source)

    def put_held_out(
        self, name: str, seconds: np.ndarray, groups: np.ndarray, odd: np.ndarray
    ) -> None:
        """Enter how well operations of even steps predict those of odd ones.

        Args:
            name: of the cost.
            seconds: float64 [N].
            groups: int64 [N], operations of equal work.
            odd: bool [N].
        """
        # Steps alternate, so that both halves saw the machine at the same times.
        residuals = []
        for group in np.unique(groups):
            members = groups == group
            odd_s = seconds[members & odd]
            even_s = seconds[members & ~odd]
            if min(len(odd_s), len(even_s)) < LEAST_SAMPLES:
                continue
            ratio = clipped_mean(even_s) / clipped_mean(odd_s)
            residuals.append(abs(ratio - 1.0))
        if not residuals:
            return

        report = FitReport(
            samples=len(seconds),
            held_out=len(residuals),
            residual_median=float(np.median(residuals)),
            residual_worst=float(np.max(residuals)),
        )
        self.fit[name] = report.as_table()

"""Lines and rooflines through operations at several points, and the entries of a
profile that all fits fill.

Errors are relative, not absolute: a microsecond matters at a microsecond. Every fit
reports how far it missed points that it had not seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from moesim.hwprofiles.calibration.estimates import (
    Estimate,
    FitReport,
    Resampled,
    Singles,
    clipped_mean,
    interquartile_range,
    interval_around,
    inverse,
    nonnegative,
    resampled,
)
from moesim.hwprofiles.roofline import isotonic
from moesim.hwprofiles.schema import Curve, Quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from moesim.hwprofiles.calibration.estimates import Units

LEAST_SAMPLES = 8
"""Operations of one size below which they are no point of their own."""
_REFITS = 100
"""Draws of a fit, whose rates scatter more than means do: 40 held peaks in 89 %."""
_TINY_S = 1e-12
_NEGLIGIBLE = 1e-12
"""Difference between sums of squared relative residuals that decides nothing."""


class Points:
    """Seconds that were measured at some points: N samples, P points.

    Args:
        seconds: float64 [N].
        point: int64 [N], number of each sample's point.
        units: of the samples.
        centre: one value for the samples of a point.

    Attributes:
        units: as given.
        middle_s: float64 [P], the centres.
    """

    def __init__(
        self,
        seconds: np.ndarray,
        point: np.ndarray,
        units: Units | Singles,
        centre: Callable[[np.ndarray], Any] = clipped_mean,
    ) -> None:
        self._seconds = seconds
        self._point = point
        self.units = units
        self._centre = centre
        self.middle_s = np.zeros(int(point.max(initial=-1)) + 1)
        self.middle_s = self.centres(np.arange(len(seconds)))

    @classmethod
    def single(cls, seconds: Sequence[np.ndarray]) -> Points:
        """Independent measurements by point, whose medians count."""
        point = np.repeat(np.arange(len(seconds)), list(map(len, seconds)))
        return cls(np.concatenate(seconds), point, Singles(point), np.median)

    def centres(self, rows: np.ndarray) -> np.ndarray:
        """One value of each point for some of the samples, float64 [P]."""
        drawn = pd.Series(self._seconds[rows]).groupby(self._point[rows])
        centres = self.middle_s.copy()
        # No unit that was drawn may have had a point, which then stays.
        for point, seconds in drawn:
            centres[point] = self._centre(seconds.to_numpy())
        return centres


class Roofline(NamedTuple):
    """Seconds = overhead + max(bytes x per byte, FLOPs x per FLOP), and how far that is
    from points that were left out.
    """

    overhead_s: Estimate
    per_byte_s: Estimate
    per_flop_s: Estimate
    report: FitReport

    @property
    def constants(self) -> tuple[Estimate, Estimate, Estimate]:
        """In the order of `moesim.hwprofiles.paths.RooflinePaths`."""
        return self.overhead_s, self.per_byte_s, self.per_flop_s

    def seconds(self, read_bytes: Any, flops: Any) -> np.ndarray:
        """As the constants say."""
        constants = (each.value for each in self.constants)
        return _seconds(constants, read_bytes, flops)


def _seconds(constants: Iterable[float], read_bytes: Any, flops: Any) -> np.ndarray:
    overhead_s, per_byte_s, per_flop_s = constants
    waited_s = np.maximum(per_byte_s * read_bytes, per_flop_s * flops)
    return np.asarray(overhead_s + waited_s)


def fit_line(samples: Mapping[int, np.ndarray]) -> Roofline:
    """Fit seconds = overhead + size x per byte to independent measurements by size, in
    ascending order.
    """
    return fit_roofline(
        [*samples], np.zeros(len(samples)), Points.single([*samples.values()])
    )


def fit_roofline(
    read_bytes: Sequence[float] | np.ndarray,
    flops: Sequence[float] | np.ndarray,
    points: Points,
) -> Roofline:
    """Fit seconds = overhead + max(bytes x per byte, FLOPs x per FLOP), with relative
    residuals.

    For every possible border between points that wait for memory and points that wait
    for arithmetic (ordered by FLOPs per byte), the three constants are a linear
    least-squares problem; the border with the smallest residual wins. Only points of
    *different* bytes separate overhead from bandwidth; the overhead of a single one is
    zero. Without FLOPs it is a line.

    Args:
        read_bytes: of each point.
        flops: of each point.
        points: what was measured.

    Raises:
        ValueError: fewer than three points with FLOPs.
    """
    moved = np.asarray(read_bytes, dtype=np.float64)
    work = np.asarray(flops, dtype=np.float64)
    count = len(moved)
    if work.any() and count < 3:
        raise ValueError(f"a roofline needs at least three points, got {count}")

    def solve(centres: np.ndarray, rows: np.ndarray) -> np.ndarray:
        # Whatever the rates, points with fewer FLOPs per byte wait for memory first.
        rows = rows[np.argsort((work / moved)[rows], kind="stable")]
        at, read, computed = centres[rows], moved[rows], work[rows]
        base = np.full(len(rows), float(count > 1))
        best, smallest = np.zeros(3), np.inf
        # Memory first: where both explain the points, it is the cause.
        for border in range(len(rows), -1 if work.any() else len(rows) - 1, -1):
            waits = np.arange(len(rows)) < border
            columns = np.column_stack([base, read * waits, computed * ~waits])
            # Divided by the centres, absolute residuals become relative ones.
            constants = nonnegative(columns / at[:, None], np.ones(len(rows)))
            # A rate that no point waited for is at least the fastest seen.
            rest_s = np.maximum(at - constants[0], _TINY_S)
            least = [
                0.0,
                *(np.min(rest_s / of) if of.all() else 0.0 for of in (read, computed)),
            ]
            constants = np.where(constants > 0, constants, least)
            missed = np.sum((_seconds(constants, read, computed) / at - 1) ** 2)
            if missed < smallest - _NEGLIGIBLE:
                best, smallest = constants, missed
        return best

    every = np.arange(count)
    missed = []
    # With as many constants as points, nothing is left to be held against.
    for left_out in every if count > (3 if work.any() else 2) else ():
        without = solve(points.middle_s, np.delete(every, left_out))
        predicted_s = _seconds(without, moved[left_out], work[left_out])
        missed.append(abs(float(predicted_s / points.middle_s[left_out]) - 1))
    estimates = Resampled.of(
        lambda rows: solve(points.centres(rows), every),
        points.units,
        np.random.default_rng(0),
        _REFITS,
    ).estimates()
    report = FitReport.of(missed, len(points.units.of_rows))
    overhead_s, per_byte_s, per_flop_s = estimates
    return Roofline(overhead_s, per_byte_s, per_flop_s, report)


def groups_with_enough(groups: pd.Series) -> pd.Series:
    """Tell which operations belong to a group of enough; where none does, to the
    largest: a curve of one doubtful point is still better than none.
    """
    counts = groups.map(groups.value_counts())
    return counts >= min(LEAST_SAMPLES, counts.max())


def _mean(seconds: pd.Series) -> float:
    return clipped_mean(seconds.to_numpy())


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
        estimate: Estimate,
        source: str,
        *,
        samples: int,
        quantiles: tuple[float, ...] = (),
    ) -> None:
        """Enter a number of seconds, as its inverse where a path of a rate says
        ``_per_s``; its interval is widened to hold it.
        """
        if path.endswith("_per_s"):
            estimate = inverse(estimate)
        self.numbers[path] = Quantity(
            estimate.value,
            "measured",
            source,
            samples=samples,
            spread=estimate.spread,
            date=self.date,
            interval=interval_around(estimate.value, *estimate.interval),
            quantiles=quantiles,
        )

    def put_fit(self, constants: Sequence[str], fit: Roofline, source: str) -> None:
        """Enter the constants of a roofline, or the first two, of a line."""
        for path, estimate in zip(constants, fit.constants, strict=False):
            self.put(path, estimate, source, samples=fit.report.samples)

    def put_mean(
        self, path: str, seconds: np.ndarray, units: Units, source: str
    ) -> None:
        """Enter the mean of samples, never below zero."""
        mean = resampled(seconds, units, self.rng)
        low, high = mean.interval
        # Differences of gaps can come out negative; seconds of a machine cannot.
        positive = Estimate(max(0.0, mean.value), (max(0.0, low), high), mean.spread)
        self.put(path, positive, source, samples=len(seconds))

    def put_curve(
        self,
        path: str,
        seconds: pd.Series,
        at: pd.Series,
        unit: str,
        source: str,
        *,
        rising: bool = True,
        **known: Any,
    ) -> None:
        """Enter the clipped means of samples over a size.

        Args:
            path: of the curve.
            seconds: of each sample.
            at: its size.
            unit: of the sizes.
            source: in words.
            rising: larger operations never take less time, so a dip is noise.
            known: further fields of the curve.
        """
        by_size = seconds.groupby(at)
        means_s = by_size.apply(_mean).to_numpy()
        self.curves[path] = Curve(
            unit=unit,
            at=tuple(at.sort_values().unique().astype(float).tolist()),
            seconds=tuple((isotonic(means_s) if rising else means_s).tolist()),
            kind="measured",
            source=source,
            samples=int(by_size.size().min()),
            spread=tuple(interquartile_range(of.to_numpy()) for _, of in by_size),
            date=self.date,
            **known,
        )

    def put_held_out(
        self, name: str, seconds: pd.Series, groups: pd.Series, odd: pd.Series
    ) -> None:
        """Enter how well operations of even steps predict those of odd ones.

        Args:
            name: of the cost.
            seconds: of each operation.
            groups: operations of equal work.
            odd: whether its step is.
        """
        # Steps alternate, so that both halves saw the machine at the same times.
        even_s, odd_s = (
            half.groupby(groups).agg(["size", _mean]).query("size >= @LEAST_SAMPLES")
            for half in (seconds[~odd], seconds[odd])
        )
        residuals = (even_s["_mean"] / odd_s["_mean"] - 1.0).abs().dropna()
        if len(residuals):
            self.fit[name] = FitReport.of(residuals.to_numpy(), len(seconds)).as_table()

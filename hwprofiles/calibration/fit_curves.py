"""Lines and rooflines through measurements of operations in isolation.

Errors are relative, not absolute: a microsecond matters at a microsecond. Every fit
reports how far it missed points that it had not seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import scipy

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import (
    Estimate,
    FitReport,
    Resampled,
    clipped_mean,
    interval_around,
    inverse,
    resampled,
)
from moesim.hwprofiles.schema import Curve, Quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moesim.hwprofiles.calibration.estimates import Units


_REFITS = 100
"""Resamplings behind the intervals."""
_TINY_S = 1e-12
_NEGLIGIBLE = 1e-12
"""Difference between sums of squared relative residuals that decides nothing."""


class Line(NamedTuple):
    """Seconds = base + slope x size."""

    base_s: Estimate
    slope_s: Estimate
    report: FitReport


class Roofline(NamedTuple):
    """Seconds = overhead + max(bytes / bytes_per_s, flops / flops_per_s)."""

    overhead_s: Estimate
    bytes_per_s: Estimate
    flops_per_s: Estimate
    report: FitReport


class Centres(NamedTuple):
    """Points that a curve is fitted through: one value each, and how far to trust it.

    Attributes:
        values: float64 [points], seconds.
        redrawn: makes the values anew from redrawn units of repetition.
        units: how many of these there are.
        samples: measurements behind all values.
    """

    values: np.ndarray
    redrawn: Callable[[np.random.Generator], np.ndarray]
    units: int
    samples: int

    @classmethod
    def medians(cls, seconds: Sequence[np.ndarray]) -> Centres:
        """Medians of independent measurements, each point for itself."""
        points = [np.asarray(point, dtype=np.float64) for point in seconds]

        def redrawn(rng: np.random.Generator) -> np.ndarray:
            again = [np.median(rng.choice(point, len(point))) for point in points]
            return np.array(again)

        return cls(
            values=np.array([np.median(point) for point in points]),
            redrawn=redrawn,
            units=min(map(len, points)),
            samples=sum(map(len, points)),
        )


def fit_line(
    samples: Mapping[int, np.ndarray],
    *,
    centres: Centres | None = None,
) -> Line:
    """Fit seconds = base + slope x size, with relative residuals and neither constant
    negative.

    Args:
        samples: size -> seconds, at least two sizes.
        centres: what is fitted, in ascending order of sizes, then also of one size,
            whose base is zero; medians when None.

    Raises:
        ValueError: fewer than two sizes.
    """
    sizes = np.array(sorted(samples), dtype=np.float64)
    if centres is None and len(sizes) < 2:
        raise ValueError(f"a line needs at least two sizes, got {len(sizes)}")
    centres = centres or Centres.medians([samples[size] for size in sorted(samples)])
    # One size cannot tell latency from bandwidth.
    columns = np.column_stack([np.full(len(sizes), len(sizes) > 1), sizes])

    def solve(medians: np.ndarray, keep: np.ndarray) -> np.ndarray:
        # Divided by the medians, absolute residuals become relative ones.
        return _nonnegative(columns[keep] / medians[keep, None])

    (base_s, slope_s), report = _with_report(
        centres, solve, lambda constants: columns @ constants
    )
    return Line(base_s, slope_s, report)


def fit_roofline(
    read_bytes: Sequence[float],
    flops: Sequence[float],
    seconds: Sequence[np.ndarray],
    *,
    centres: Centres | None = None,
) -> Roofline:
    """Fit seconds = overhead + max(bytes / rate, flops / rate), with relative
    residuals.

    For every possible border between points that wait for memory and points that wait
    for arithmetic (ordered by FLOPs per byte), the three constants are a linear
    least-squares problem; the border with the smallest residual wins. Only points of
    *different* bytes separate overhead from bandwidth.

    Args:
        read_bytes: of each point.
        flops: of each point.
        seconds: measurements of each point.
        centres: what is fitted; medians when None.

    Raises:
        ValueError: fewer than three points.
    """
    centres = centres or Centres.medians(seconds)
    moved = np.asarray(read_bytes, dtype=np.float64)
    work = np.asarray(flops, dtype=np.float64)
    if len(moved) < 3:
        raise ValueError(f"a roofline needs at least three points, got {len(moved)}")

    def bounded(constants: np.ndarray, rows: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Give a rate that no point waited for the fastest value seen: it is at least
        that.
        """
        overhead_s = constants[0]
        rest_s = np.maximum(at - overhead_s, _TINY_S)
        per_byte = np.min(rest_s / moved[rows])
        per_flop = np.min(rest_s / work[rows])
        fastest = np.array([0.0, per_byte, per_flop])
        return np.where(constants > 0, constants, fastest)

    def predict(constants: np.ndarray) -> np.ndarray:
        reading_s = moved * constants[1]
        computing_s = work * constants[2]
        return np.asarray(constants[0] + np.maximum(reading_s, computing_s))

    def solve(medians: np.ndarray, keep: np.ndarray) -> np.ndarray:
        # Whatever the rates, points with fewer FLOPs per byte wait for memory first.
        intensity = work / moved
        order = np.argsort(intensity[keep], kind="stable")
        rows = np.flatnonzero(keep)[order]
        at = medians[rows]
        ones = np.ones(len(rows))
        best = np.zeros(3)
        smallest = np.inf
        # Memory first: where both explain the points, it is the cause.
        for border in range(len(rows), -1, -1):
            reads = np.arange(len(rows)) < border
            read = moved[rows] * reads
            computed = work[rows] * ~reads
            columns = np.column_stack([ones, read, computed])
            free = _nonnegative(columns / at[:, None])
            constants = bounded(free, rows, at)
            residuals = predict(constants)[rows] / at - 1
            missed = float(np.sum(residuals**2))
            if missed < smallest - _NEGLIGIBLE:
                best = constants
                smallest = missed
        return best

    (overhead_s, per_byte, per_flop), report = _with_report(centres, solve, predict)
    return Roofline(overhead_s, inverse(per_byte), inverse(per_flop), report)


def _with_report(
    centres: Centres,
    solve: Callable[[np.ndarray, np.ndarray], np.ndarray],
    predict: Callable[[np.ndarray], np.ndarray],
) -> tuple[list[Estimate], FitReport]:
    """Fit, leave each point out in turn, and refit resampled measurements.

    Args:
        centres: of the points.
        solve: (centres [points], which points to use [points]) -> constants.
        predict: constants -> seconds [points].
    """
    at = centres.values
    every = np.ones(len(at), dtype=np.bool_)
    constants = solve(at, every)
    missed = []
    # With as many constants as points, nothing is left to be held against.
    for left_out in range(len(at) if len(at) > len(constants) else 0):
        without = solve(at, np.arange(len(at)) != left_out)
        missed.append(abs(float(predict(without)[left_out] / at[left_out]) - 1))

    rng = np.random.default_rng(0)
    draws = np.array([solve(centres.redrawn(rng), every) for _ in range(_REFITS)])
    resampled = Resampled(constants, draws, centres.units)
    return resampled.estimates(), FitReport.of(missed, centres.samples)


def _nonnegative(columns: np.ndarray) -> np.ndarray:
    """Solve columns @ x ~ 1 with x >= 0; returns [columns]."""
    # Of equally long columns, the first of those that explain as much is taken.
    length = np.maximum(np.linalg.norm(columns, axis=0), _TINY_S)
    return np.asarray(
        scipy.optimize.nnls(columns / length, np.ones(len(columns)))[0] / length
    )


LEAST_SAMPLES = 8
"""Operations of one size below which they are no point of their own."""


class Point(NamedTuple):
    """Operations of one group: their mean size, their seconds, the clipped mean of
    those, and the rows that they were.
    """

    group: int
    size: float
    seconds: np.ndarray
    mean_s: float
    rows: np.ndarray


def points_of(
    seconds: np.ndarray, sizes: np.ndarray, groups: np.ndarray
) -> list[Point]:
    """Return groups with enough operations; where none has, the largest.

    Args:
        seconds: float64 [N].
        sizes: int64 [N].
        groups: int64 [N], operations of about the same size.
    """
    numbers, counts = np.unique(groups, return_counts=True)
    enough = counts >= LEAST_SAMPLES
    # A curve of one doubtful point is still better than none.
    chosen = numbers[enough] if enough.any() else numbers[[counts.argmax()]]

    points = []
    for group in chosen:
        members = groups == group
        # Rounded, since tokens within a group differ and a file should be readable.
        points.append(
            Point(
                group=int(group),
                size=round(float(sizes[members].mean()), 3),
                seconds=seconds[members],
                mean_s=clipped_mean(seconds[members]),
                rows=np.flatnonzero(members),
            )
        )
    return points


def seconds_of(points: Sequence[Point], groups: np.ndarray) -> np.ndarray:
    """Look up the mean seconds of each operation's group, float64 [N]; NaN where it is
    no point.

    Args:
        points: at least one.
        groups: int64 [N].
    """
    highest = max(groups.max(initial=0), *(point.group for point in points))
    table = np.full(int(highest) + 1, np.nan)
    for point in points:
        table[point.group] = point.mean_s
    return np.asarray(table[groups])


def centres_of(points: Sequence[Point], seconds: np.ndarray, units: Units) -> Centres:
    """Return clipped means of points, and what they are of redrawn units.

    Args:
        points: of `points_of`.
        seconds: float64 [N], of all samples that the points' rows count.
        units: of these samples.
    """
    point_of = np.full(len(seconds), -1)
    for number, point in enumerate(points):
        point_of[point.rows] = number

    def redrawn(rng: np.random.Generator) -> np.ndarray:
        rows = units.redrawn(rng)
        again = []
        for number, point in enumerate(points):
            drawn = seconds[rows[point_of[rows] == number]]
            # No unit that was drawn may have had this point.
            again.append(clipped_mean(drawn) if len(drawn) else point.mean_s)
        return np.array(again)

    return Centres(
        values=np.array([point.mean_s for point in points]),
        redrawn=redrawn,
        units=units.count,
        samples=sum(len(point.seconds) for point in points),
    )


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
        """Enter a number; its interval is widened to hold it."""
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

    def put_mean(
        self, path: str, seconds: np.ndarray, units: Units, source: str
    ) -> None:
        """Enter the mean of samples, never below zero."""
        mean = resampled(seconds, units, self.rng)
        low, high = mean.interval
        # Differences of gaps can come out negative; seconds of a machine cannot.
        positive = Estimate(max(0.0, mean.value), (max(0.0, low), high), mean.spread)
        self.put(path, positive, source, samples=len(seconds))

    def put_roofline(
        self, part: str, roof: Roofline, *, samples: int, source: str
    ) -> None:
        """Enter the constants of a roofline."""
        for path, estimate in zip(paths.roofline(part), roof[:3], strict=True):
            self.put(path, estimate, source, samples=samples)

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
            if min(len(odd_s), len(even_s)) >= LEAST_SAMPLES:
                ratio = clipped_mean(even_s) / clipped_mean(odd_s)
                residuals.append(abs(ratio - 1.0))
        if residuals:
            self.fit[name] = FitReport.of(residuals, len(seconds)).as_table()

"""Lines and rooflines through measurements of operations in isolation.

Errors are relative, not absolute: a microsecond matters at a microsecond. Every fit
reports how far it missed points that it had not seen.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesim.hwprofiles.calibration.estimates import (
    DrawSummary,
    Estimate,
    FitReport,
    interval_around,
    inverse,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_LINE_DRAWS = 200
_ROOFLINE_DRAWS = 60
"""Resamplings behind the intervals. A roofline is refitted for every border between
its branches, so it gets fewer.
"""
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


def fit_line(
    samples: Mapping[int, np.ndarray],
    *,
    seed: int = 0,
) -> Line:
    """Fit seconds = base + slope x size to the medians, with relative residuals and
    neither constant negative.

    Args:
        samples: size -> seconds, at least two sizes.
        seed: of the resampling behind the intervals.

    Raises:
        ValueError: fewer than two sizes.
    """
    sizes = np.array(sorted(samples), dtype=np.float64)
    if len(sizes) < 2:
        raise ValueError(f"a line needs at least two sizes, got {len(sizes)}")
    seconds = [np.asarray(samples[size], dtype=np.float64) for size in sorted(samples)]
    columns = np.column_stack([np.ones_like(sizes), sizes])

    def solve(medians: np.ndarray, keep: np.ndarray) -> np.ndarray:
        # Divided by the medians, absolute residuals become relative ones.
        return _nonnegative(columns[keep] / medians[keep, None])

    def predict(constants: np.ndarray) -> np.ndarray:
        return np.asarray(columns @ constants)

    constants, report = _with_report(
        seconds, solve, predict, draws=_LINE_DRAWS, seed=seed
    )
    return Line(
        base_s=constants[0],
        slope_s=constants[1],
        report=report,
    )


def fit_roofline(
    read_bytes: Sequence[float],
    flops: Sequence[float],
    seconds: Sequence[np.ndarray],
    *,
    seed: int = 0,
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
        seed: of the resampling behind the intervals.

    Raises:
        ValueError: fewer than three points.
    """
    moved = np.asarray(read_bytes, dtype=np.float64)
    work = np.asarray(flops, dtype=np.float64)
    if len(moved) < 3:
        raise ValueError(f"a roofline needs at least three points, got {len(moved)}")

    def bounded(
        constants: np.ndarray,
        rows: np.ndarray,
        at: np.ndarray,
    ) -> np.ndarray:
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

    constants, report = _with_report(
        seconds, solve, predict, draws=_ROOFLINE_DRAWS, seed=seed
    )
    return Roofline(
        overhead_s=constants[0],
        bytes_per_s=inverse(constants[1]),
        flops_per_s=inverse(constants[2]),
        report=report,
    )


def _with_report(
    seconds: Sequence[np.ndarray],
    solve: Callable[[np.ndarray, np.ndarray], np.ndarray],
    predict: Callable[[np.ndarray], np.ndarray],
    *,
    draws: int,
    seed: int,
) -> tuple[list[Estimate], FitReport]:
    """Fit, leave each point out in turn, and refit resampled measurements.

    Args:
        seconds: measurements of each point.
        solve: (medians [points], which points to use [points]) -> constants.
        predict: constants -> seconds [points].
        draws: how often measurements are resampled (bootstrap).
        seed: of the resampling.
    """
    medians = np.array([np.median(point) for point in seconds])
    all_points = np.ones(len(medians), dtype=np.bool_)
    constants = solve(medians, all_points)

    # With as many constants as points, nothing is left to be held against.
    missed = []
    if len(medians) > len(constants):
        for left_out in range(len(medians)):
            keep = all_points.copy()
            keep[left_out] = False
            without = solve(medians, keep)
            predicted_s = float(predict(without)[left_out])
            missed.append(abs(predicted_s / medians[left_out] - 1))

    rng = np.random.default_rng(seed)
    redrawn = []
    for _ in range(draws):
        resampled = [np.median(rng.choice(point, len(point))) for point in seconds]
        redrawn.append(solve(np.array(resampled), all_points))
    drawn = DrawSummary.of(redrawn)

    estimates = [
        Estimate(
            value=float(value),
            interval=interval_around(value, lower, upper),
            spread=float(spread),
        )
        for value, lower, upper, spread in zip(constants, *drawn, strict=True)
    ]
    report = FitReport(
        samples=sum(len(point) for point in seconds),
        held_out=len(missed),
        residual_median=float(np.median(missed)) if missed else 0.0,
        residual_worst=max(missed, default=0.0),
    )
    return estimates, report


def _nonnegative(columns: np.ndarray) -> np.ndarray:
    """Solve columns @ x ~ 1 with x >= 0 by trying every set of columns; there are two
    or three. Returns [columns].
    """
    count = columns.shape[1]
    best = np.zeros(count)
    smallest = np.inf
    ones = np.ones(len(columns))
    # Small sets first: of equally good answers the one with fewer constants stays.
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            part_columns = columns[:, chosen]
            part = np.linalg.lstsq(part_columns, ones, rcond=None)[0]
            residuals = part_columns @ part - ones
            missed = float(np.sum(residuals**2))
            nonnegative = (part >= 0).all()
            if nonnegative and missed < smallest - _NEGLIGIBLE:
                best = np.zeros(count)
                smallest = missed
                best[chosen] = part
    return best

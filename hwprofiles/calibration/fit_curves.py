"""From measurements to costs.

A machine answers the same question a little differently each time, and now and then
much later. So medians instead of means, relative instead of absolute errors (a
microsecond matters at a microsecond), and every fit says how far it missed points that
it had not seen.

Samples are passed as arrays of seconds, one per size: `Mapping[size, float64 [n]]`.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from moesim.hwprofiles.schema import Curve, Quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moesim.hwprofiles.schema import ReferenceExpert

_LINE_DRAWS = 200
_ROOFLINE_DRAWS = 60
_QUANTILES = np.linspace(0.0, 1.0, 21)
_TINY_S = 1e-12
_NEGLIGIBLE = 1e-12
"""Difference between sums of squared relative residuals that decides nothing."""


class FitReport(NamedTuple):
    """How far a fit missed points that it had not seen, each left out in turn;
    residuals are relative.

    `samples` measurements went in; `held_out` points were left out, one at a time.
    """

    samples: int
    held_out: int
    residual_median: float
    residual_worst: float


class Estimate(NamedTuple):
    """A fitted constant: its value, 95 % interval, and interquartile range, over
    resampled measurements.
    """

    value: float
    interval: tuple[float, float]
    spread: float


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


def isotonic(values: np.ndarray) -> np.ndarray:
    """Return the non-decreasing sequence closest to `values` in the least-squares
    sense.

    More tokens never take less time; a table that says otherwise holds noise. Source:
    pool adjacent violators.
    """
    blocks: list[list[float]] = []  # [mean, length], means strictly ascending
    for value in np.asarray(values, dtype=np.float64):
        blocks.append([float(value), 1.0])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, length = blocks.pop()
            total = blocks[-1][1] + length
            blocks[-1] = [
                (blocks[-1][0] * blocks[-1][1] + mean * length) / total,
                total,
            ]
    return np.repeat(
        [mean for mean, _ in blocks], [int(length) for _, length in blocks]
    )


def measured(samples: np.ndarray, *, source: str, date: str) -> Quantity:
    """Summarise repeated measurements of one number: median, interquartile range,
    interval of the median.

    Source: the interval is between order statistics, ``n/2 ± 0.98 sqrt(n)`` (binomial,
    normal approximation).
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    count = len(ordered)
    reach = 0.98 * np.sqrt(count)
    low, high = ordered[
        [
            max(0, int(count / 2 - reach)),
            min(count - 1, int(np.ceil(count / 2 + reach))),
        ]
    ]
    return Quantity(
        value=float(np.median(ordered)),
        kind="measured",
        source=source,
        samples=count,
        spread=_iqr(ordered),
        date=date,
        interval=(float(low), float(high)),
    )


def measured_curve(
    samples: Mapping[int, np.ndarray],
    unit: str,
    *,
    source: str,
    date: str,
    reference: ReferenceExpert | None = None,
) -> Curve:
    """Summarise measurements at several sizes: median and interquartile range of each.

    `samples` of the curve is the fewest at one size. `quantiles` pools all sizes:
    single operations relative to the median of their size, which is what a simulator
    may draw from.
    """
    sizes = sorted(samples)
    medians = [float(np.median(samples[size])) for size in sizes]
    ratios = np.concatenate(
        [
            np.asarray(samples[size]) / median
            for size, median in zip(sizes, medians, strict=True)
        ]
    )
    return Curve(
        unit=unit,
        at=tuple(sizes),
        seconds=tuple(medians),
        kind="measured",
        source=source,
        samples=min(len(samples[size]) for size in sizes),
        spread=tuple(_iqr(samples[size]) for size in sizes),
        date=date,
        quantiles=tuple(
            round(float(ratio), 4) for ratio in np.quantile(ratios, _QUANTILES)
        ),
        reference=reference,
    )


def estimated(estimate: Estimate, *, samples: int, source: str, date: str) -> Quantity:
    """Turn a fitted constant into a profile's number."""
    return Quantity(
        value=estimate.value,
        kind="measured",
        source=source,
        samples=samples,
        spread=estimate.spread,
        date=date,
        interval=estimate.interval,
    )


def inverse(estimate: Estimate) -> Estimate:
    """Turn seconds per unit into units per second; the spread is carried over
    relatively.
    """
    low, high = estimate.interval
    value = 1 / max(estimate.value, _TINY_S**2)
    return Estimate(
        value,
        (min(value, 1 / max(high, _TINY_S**2)), max(value, 1 / max(low, _TINY_S**2))),
        estimate.spread * value * value,
    )


def fit_line(samples: Mapping[int, np.ndarray], *, seed: int = 0) -> Line:
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
        return _nonnegative(columns[keep] / medians[keep, None])

    def predict(constants: np.ndarray) -> np.ndarray:
        return np.asarray(columns @ constants)

    (base, slope), report = _with_report(
        seconds, solve, predict, draws=_LINE_DRAWS, seed=seed
    )
    return Line(base, slope, report)


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

    def bounded(constants: np.ndarray, rows: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Give a rate that no point waited for the fastest value seen: it is at least
        that.
        """
        rest_s = np.maximum(at - constants[0], _TINY_S)
        fastest = np.array(
            [0.0, np.min(rest_s / moved[rows]), np.min(rest_s / work[rows])]
        )
        return np.where(constants > 0, constants, fastest)

    def predict(constants: np.ndarray) -> np.ndarray:
        return np.asarray(
            constants[0] + np.maximum(moved * constants[1], work * constants[2])
        )

    def solve(medians: np.ndarray, keep: np.ndarray) -> np.ndarray:
        order = np.argsort((work / moved)[keep], kind="stable")
        rows = np.flatnonzero(keep)[order]
        at = medians[keep][order]
        found = np.zeros(3)
        smallest = np.inf
        # Memory first: where both explain the points, it is the cause.
        for border in range(len(rows), -1, -1):
            reads = np.arange(len(rows)) < border
            columns = np.column_stack(
                [np.ones(len(rows)), moved[rows] * reads, work[rows] * ~reads]
            )
            constants = bounded(_nonnegative(columns / at[:, None]), rows, at)
            missed = float(np.sum((predict(constants)[rows] / at - 1) ** 2))
            if missed < smallest - _NEGLIGIBLE:
                found = constants
                smallest = missed
        return found

    (overhead, per_byte, per_flop), report = _with_report(
        seconds, solve, predict, draws=_ROOFLINE_DRAWS, seed=seed
    )
    return Roofline(overhead, inverse(per_byte), inverse(per_flop), report)


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
    everything = np.ones(len(medians), dtype=np.bool_)
    constants = solve(medians, everything)
    missed = []
    if len(medians) > len(constants):
        for left_out in range(len(medians)):
            keep = everything.copy()
            keep[left_out] = False
            missed.append(
                abs(
                    float(predict(solve(medians, keep))[left_out]) / medians[left_out]
                    - 1
                )
            )
    rng = np.random.default_rng(seed)
    redrawn = np.array(
        [
            solve(
                np.array(
                    [np.median(rng.choice(point, len(point))) for point in seconds]
                ),
                everything,
            )
            for _ in range(draws)
        ]
    )
    low, quarter, three_quarters, high = np.quantile(
        redrawn, (0.025, 0.25, 0.75, 0.975), axis=0
    )
    estimates = [
        Estimate(
            float(value), (float(min(value, lo)), float(max(value, hi))), float(iqr)
        )
        for value, lo, hi, iqr in zip(
            constants, low, high, three_quarters - quarter, strict=True
        )
    ]
    return estimates, FitReport(
        samples=sum(len(point) for point in seconds),
        held_out=len(missed),
        residual_median=float(np.median(missed)) if missed else 0.0,
        residual_worst=max(missed, default=0.0),
    )


def _iqr(values: np.ndarray) -> float:
    low, high = np.quantile(values, (0.25, 0.75))
    return float(high - low)


def _nonnegative(columns: np.ndarray) -> np.ndarray:
    """Solve columns @ x ~ 1 with x >= 0 by trying every set of columns; there are two
    or three. Returns [columns].
    """
    count = columns.shape[1]
    best = np.zeros(count)
    smallest = np.inf
    ones = np.ones(len(columns))
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            part, *_ = np.linalg.lstsq(columns[:, chosen], ones, rcond=None)
            missed = float(np.sum((columns[:, chosen] @ part - ones) ** 2))
            if (part >= 0).all() and missed < smallest - _NEGLIGIBLE:
                best = np.zeros(count)
                smallest = missed
                best[chosen] = part
    return best

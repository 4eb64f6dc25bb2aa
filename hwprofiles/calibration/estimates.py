"""Repeated measurements as entries of a profile: a value, its spread, its interval.

A machine answers the same question a little differently each time, and now and then
much later. So medians instead of means.

Samples are passed as arrays of seconds, one per size: `Mapping[size, float64 [n]]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesim.hwprofiles.schema import Curve, Quantity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.hwprofiles.schema import ReferenceExpert

_PROBABILITIES = np.linspace(0.0, 1.0, 21)
"""Of the quantiles that a profile keeps."""

_LEAST = 1e-24
"""Below it a slope counts as zero, so that its inverse stays finite."""


class FitReport(NamedTuple):
    """How far a fit missed points that it had not seen, each left out in turn;
    residuals are relative.

    `samples` measurements went in; `held_out` points were left out, one at a time.
    """

    samples: int
    held_out: int
    residual_median: float
    residual_worst: float

    def as_table(self) -> dict[str, float]:
        """Return the TOML table of a profile's ``[fit.<cost>]``."""
        return {key: float(value) for key, value in self._asdict().items()}


class Estimate(NamedTuple):
    """A fitted constant: its value, 95 % interval, and interquartile range, over
    resampled measurements.
    """

    value: float
    interval: tuple[float, float]
    spread: float


class DrawSummary(NamedTuple):
    """What estimates from resampled measurements spread over.

    Attributes:
        low, high: 95 % interval, each float64 [...].
        spread: interquartile range, float64 [...].
    """

    low: np.ndarray
    high: np.ndarray
    spread: np.ndarray

    @classmethod
    def of(cls, draws: Sequence[float] | Sequence[np.ndarray]) -> DrawSummary:
        """Summarise draws [n, ...] over their first axis."""
        low, quarter, three_quarters, high = np.quantile(
            np.array(draws), (0.025, 0.25, 0.75, 0.975), axis=0
        )
        return cls(low, high, three_quarters - quarter)


def measured(samples: np.ndarray, *, source: str, date: str) -> Quantity:
    """Summarise repeated measurements of one number: median, interquartile range,
    interval of the median.

    Args:
        samples: [n], in the number's unit.
        source: the procedure, in words.
        date: of the measurement, ISO 8601.

    Source: the interval is between order statistics, ``n/2 ± 0.98 sqrt(n)`` (binomial,
    normal approximation).
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    count = len(ordered)
    half_width = 0.98 * np.sqrt(count)
    # With a handful of samples the interval is all of them.
    low_rank = max(0, int(count / 2 - half_width))
    high_rank = min(count - 1, int(np.ceil(count / 2 + half_width)))
    return Quantity(
        value=float(np.median(ordered)),
        kind="measured",
        source=source,
        samples=count,
        spread=interquartile_range(ordered),
        date=date,
        interval=(float(ordered[low_rank]), float(ordered[high_rank])),
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

    Args:
        samples: size -> seconds [n].
        unit: of the sizes, ``tokens`` or ``bytes``.
        source: the procedure, in words.
        date: of the measurement, ISO 8601.
        reference: the expert measured, for curves over tokens.
    """
    sizes = sorted(samples)
    medians = [float(np.median(samples[size])) for size in sizes]
    # Relative to their medians, operations of all sizes scatter alike.
    ratios = np.concatenate(
        [
            np.asarray(samples[size]) / median
            for size, median in zip(sizes, medians, strict=True)
        ]
    )
    quantiles = np.quantile(ratios, _PROBABILITIES)
    return Curve(
        unit=unit,
        at=tuple(sizes),
        seconds=tuple(medians),
        kind="measured",
        source=source,
        samples=min(len(samples[size]) for size in sizes),
        spread=tuple(interquartile_range(samples[size]) for size in sizes),
        date=date,
        # Four digits, so that files stay readable: a draw is never known better.
        quantiles=tuple(round(float(ratio), 4) for ratio in quantiles),
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
    value = 1 / max(estimate.value, _LEAST)
    # The slowest rate belongs to the highest slope.
    slowest = 1 / max(high, _LEAST)
    fastest = 1 / max(low, _LEAST)
    return Estimate(
        value=value,
        interval=interval_around(value, slowest, fastest),
        spread=estimate.spread * value * value,
    )


def interval_around(value: float, low: float, high: float) -> tuple[float, float]:
    """Return an interval, widened to hold a value.

    Resampled estimates of a skewed distribution may all lie on one side of it.
    """
    return float(min(value, low)), float(max(value, high))


def interquartile_range(values: np.ndarray) -> float:
    """Distance between the quartiles of [n] values."""
    low, high = np.quantile(values, (0.25, 0.75))
    return float(high - low)

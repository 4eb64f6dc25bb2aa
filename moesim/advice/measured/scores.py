"""Scores of predictions: relative errors, their quantiles, coverage of intervals."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Prediction:
    """One predicted speed beside the measured one.

    Attributes:
        machine: on which it was measured.
        model: with its label.
        flags: in words.
        given: what the prediction was made from.
        place: file and line of the measured row.
        measured: tokens per second.
        predicted: median, tokens per second.
        low: lower end of the 90 % interval.
        high: upper end.
        group: rows of one group stand for one sweep.
        cause: known oddity of the row, if any.
    """

    machine: str
    model: str
    flags: str
    given: str
    place: str
    measured: float
    predicted: float
    low: float
    high: float
    group: str = ""
    cause: str = ""

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted / self.measured - 1

    @property
    def covered(self) -> bool:
        """Tell whether the interval holds the measured speed."""
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True)
class Score:
    """Summary of a case.

    Attributes:
        count: predictions.
        rows: distinct measured rows among them.
        machines: that they are about.
        median: of the absolute relative errors.
        p90: their 90 % quantile.
        worst: the largest.
        signed: median of the errors with their signs.
        coverage: share of intervals that hold the measured speed.
        within_40: share of errors of at most 40 %.
        balanced: mean over machine and model of the median error, so that a long sweep
            counts once.
    """

    count: int
    rows: int
    machines: int
    median: float
    p90: float
    worst: float
    signed: float
    coverage: float
    within_40: float
    balanced: float


WITHIN = 0.40


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation; NaN of nothing."""
    # Cases without rows are printed too.
    if not values:
        return float("nan")
    ordered = sorted(values)
    # Linear between order statistics, as numpy does by default.
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def score_of(predictions: Sequence[Prediction]) -> Score | None:
    """Summarise predictions; None where there are none."""
    if not predictions:
        return None

    errors = [abs(each.error) for each in predictions]
    # Long sweeps would otherwise outvote machines with one row.
    sweeps: dict[tuple[str, str], list[float]] = {}
    for each in predictions:
        sweeps.setdefault((each.machine, each.model), []).append(abs(each.error))
    medians = [median(sweep) for sweep in sweeps.values()]

    return Score(
        count=len(errors),
        # Pairs predict a row many times; this counts it once.
        rows=len({each.place for each in predictions}),
        machines=len({each.machine for each in predictions}),
        median=median(errors),
        p90=quantile(errors, 0.9),
        worst=max(errors),
        signed=median(each.error for each in predictions),
        coverage=sum(each.covered for each in predictions) / len(errors),
        within_40=sum(error <= WITHIN for error in errors) / len(errors),
        balanced=sum(medians) / len(medians),
    )

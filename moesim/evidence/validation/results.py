"""Cells of a validation: what was measured, what was predicted, the errors, and what
they show.

The unit of repetition is a run, made anew: steps of one run share the machine's speed
meanwhile and whatever disturbed it, so a hundred of them are not a hundred
measurements. Two policies have an order only where their repetitions show one (a paired
t-test), and orders are compared by Kendall's tau. `tests/evidence/test_agreement.py`
holds this to its level under drift and correlated errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HIT_COUNTS = ("hits", "delayed_hits", "misses")
FIGURES = ("tpot_s", "ttft_s", *HIT_COUNTS)
"""What is compared of a run, as `summarise` calls it."""


class Coordinates(NamedTuple):
    """Where a cell lies in the grid. `host_ratio` is the share of experts that host
    memory holds; 1 needs no SSD.
    """

    trace: str
    shape: str
    policy: str
    cache_ratio: float
    host_ratio: float
    batch: int

    def __str__(self) -> str:
        """In words."""
        return (
            f"{self.trace}, {self.shape}, {self.policy}, cache {self.cache_ratio:g},"
            f" batch {self.batch}"
        )


@dataclass(slots=True)
class Cell:
    """One cell: what was measured, in every repetition, and what was predicted.

    Attributes:
        coordinates: where it lies in the grid.
        timing_free: no decision depends on when copies land, so hits must be equal.
        extrapolated: the experts' size was not calibrated.
        measured: of each repetition `FIGURES`; ``lost``, share of a step's time that
            other programs took, median; ``steps_s``, seconds of each step after the
            first.
        predicted: `FIGURES` of the simulation, mean over replications.
        decisions_equal: whether the first repetition computed every expert where, and
            made the copies that, the simulation with mean operation times did.
    """

    coordinates: Coordinates
    timing_free: bool
    extrapolated: bool
    measured: list[dict[str, Any]] = field(default_factory=list)
    predicted: dict[str, Any] = field(default_factory=dict)
    decisions_equal: bool | None = None

    @property
    def is_known(self) -> bool:
        """Whether it was measured and predicted."""
        return bool(self.measured and self.predicted)

    def last_run(self) -> dict[str, Any]:
        """The last repetition and the prediction as plain values."""
        return {
            "coordinates": list(self.coordinates),
            "measured": self.measured[-1],
            "predicted": self.predicted,
            "decisions_equal": self.decisions_equal,
        }

    def restore(self, line: Mapping[str, Any]) -> None:
        """Take back what `last_run` returned."""
        self.measured.append(line["measured"])
        self.predicted = line["predicted"]
        self.decisions_equal = line["decisions_equal"]

    def tpot_s(self) -> float | None:
        """Measured: the mean over steps of the median over repetitions.

        The same step does the same work in all of them, so what one has more than the
        others is not its own: other tenants of a machine come in bursts of half a
        second.
        """
        steps_s = np.median([run["steps_s"] for run in self.measured], axis=0)
        return float(steps_s.mean()) if len(steps_s) else None

    def ttft_s(self) -> float | None:
        """Measured: the median over repetitions."""
        values = [run["ttft_s"] for run in self.measured]
        return None if None in values else float(np.median(values))

    def hits_equal(self) -> bool:
        """Tell whether every repetition counted the hits that were predicted."""
        return all(
            run[key] == self.predicted[key]
            for run in self.measured
            for key in HIT_COUNTS
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything, with the comparisons; errors are predicted over measured,
        minus one.
        """
        tpot_s, ttft_s = self.tpot_s(), self.ttft_s()
        return {
            **self.coordinates._asdict(),
            "timing_free": self.timing_free,
            "extrapolated": self.extrapolated,
            "measured": self.measured,
            "predicted": self.predicted,
            "tpot_measured_s": tpot_s,
            "tpot_error": self.predicted["tpot_s"] / tpot_s - 1.0 if tpot_s else None,
            "ttft_error": self.predicted["ttft_s"] / ttft_s - 1.0 if ttft_s else None,
            "noise_floor": noise_floor([run["steps_s"] for run in self.measured]),
            "hits_equal": self.hits_equal(),
            "decisions_equal": self.decisions_equal,
        }


@dataclass(slots=True)
class Validation:
    """A finished grid."""

    cells: list[Cell]
    config: dict[str, Any]
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return cells and the summary over them."""
        cells = [cell.to_json() for cell in self.cells]
        return {
            **summary(cells),
            "cells": cells,
            "config": self.config,
            "warnings": self.warnings,
        }


_COLUMNS = (
    *Coordinates._fields,
    *("timing_free", "extrapolated", "hits_equal", "measured", "predicted"),
    *("noise_floor", "tpot_error", "ttft_error"),
)
"""What the summary reads of a cell."""


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return figures over all cells; `held_out` and `calibrated` are those of sizes
    that calibration had not, and had.
    """
    frame = pd.DataFrame(cells, columns=list(_COLUMNS))
    # Where timing decides, hits may differ by what copies took; nowhere else.
    free = frame["hits_equal"][frame["timing_free"].astype(bool)].tolist()
    errors = errors_of(frame)
    # A single repetition has no noise floor, which is not a floor of zero.
    repeated = frame[frame["measured"].map(len) > 1]
    floor = _known(repeated["noise_floor"].median()) or 0.0
    extrapolated = frame["extrapolated"].astype(bool)
    return {
        **errors,
        "hits_equal": all(free) if free else None,
        "hits_compared": len(free),
        **_order_of_policies(frame),
        "noise_floor": floor,
        "error_over_noise": (errors["tpot_error_median"] or 0.0) / floor
        if floor
        else None,
        "held_out": errors_of(frame[extrapolated]),
        "calibrated": errors_of(frame[~extrapolated]),
        # JSON knows only texts as keys.
        "by": {
            key: {
                f"{value}": errors_of(members)
                for value, members in frame.groupby(key, sort=False)
            }
            for key in Coordinates._fields
        },
    }


def _order_of_policies(frame: pd.DataFrame) -> dict[str, Any]:
    """Compare orders of policies where everything else is the same."""
    others = [key for key in Coordinates._fields if key != "policy"]
    taus = []
    groups = []
    for _, group in frame.groupby(others, sort=False):
        runs = [
            [run["tpot_s"] for run in measured if run["tpot_s"]]
            for measured in group["measured"]
        ]
        # A time limit may have ended the last pass half way.
        count = min(map(len, runs))
        repetitions = [seconds[:count] for seconds in runs]
        predicted_s = [predicted["tpot_s"] for predicted in group["predicted"]]
        groups.append(repetitions)
        tau = kendall_tau(predicted_s, repetitions)
        taus += [] if tau is None else [tau]
    return {
        "kendall_tau": float(np.mean(taus)) if taus else None,
        "kendall_tau_repeated": repeated_tau(groups),
    }


def errors_of(frame: pd.DataFrame) -> dict[str, Any]:
    """Return median and largest errors of some cells."""
    errors: dict[str, Any] = {"count": len(frame)}
    # Sizes show how far a prediction is off; the signed median, to which side.
    for name in ("tpot_error", "ttft_error"):
        signed = frame[name].astype(float)
        errors[f"{name}_median"] = _known(signed.abs().median())
        errors[f"{name}_max"] = _known(signed.abs().max())
    signed = frame["tpot_error"].astype(float)
    errors["tpot_error_signed_median"] = _known(signed.median())
    return errors


def _known(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)


# -- do they agree? --------------------------------------------------------------------

LEVEL = 0.05
"""How often equal policies are ordered."""


def measured_order(
    first: Sequence[float], second: Sequence[float], *, level: float = LEVEL
) -> int:
    """Return -1 where the first is certainly smaller, 1 where the second is, 0 where
    repetitions do not tell.

    Args:
        first, second: by repetition. Those of equal number were made in the same pass
            over the grid, so what the machine did to both cancels.
        level: how often equal ones are ordered. A decision that rests on every one of N
            pairs keeps `LEVEL` with the Nth part of it for each (Bonferroni).

    Source: paired t-test of the logarithms.
    """
    if len(first) < 2:
        return 0
    apart = np.log(first) - np.log(second)
    mean = float(apart.mean())
    error = float(apart.std(ddof=1)) / np.sqrt(len(apart))
    least = float(special.stdtrit(len(apart) - 1, 1.0 - 0.5 * level)) * error
    return int(np.sign(mean)) if abs(mean) > least else 0


def ordered_alike(
    predicted: Sequence[float],
    repetitions: Sequence[Sequence[float]],
    *,
    level: float = LEVEL,
) -> list[int]:
    """Compare a predicted order with the measured one, pair by pair.

    A pair that the measurement cannot order is no evidence either way, so it is left
    out.

    Args:
        predicted: one value per policy.
        repetitions: by policy, as `measured_order` compares them.
        level: as there.

    Returns:
        Of each pair 1 where both order it alike, 0 where the prediction ties it, else
        -1.
    """
    policies = zip(predicted, repetitions, strict=True)
    alike = []
    for (first, first_runs), (second, second_runs) in combinations(policies, 2):
        sign = measured_order(first_runs, second_runs, level=level)
        if sign:
            alike.append(sign * int(np.sign(first - second)))
    return alike


def kendall_tau(
    predicted: Sequence[float], repetitions: Sequence[Sequence[float]]
) -> float | None:
    """Rank correlation of a predicted order with the measured one, -1 to 1: the mean of
    `ordered_alike`; None where the measurement orders no pair.
    """
    alike = ordered_alike(predicted, repetitions)
    return float(np.mean(alike)) if alike else None


def repeated_tau(groups: Sequence[Sequence[Sequence[float]]]) -> float | None:
    """Tau that a single repetition reaches with all others: what no simulation of them
    can be expected to pass.

    Args:
        groups: by group of policies, by policy: its repetitions.

    Returns:
        The mean, or None where nothing is repeated or no pair is ever ordered.
    """
    taus = []
    for policies in groups:
        count = min(map(len, policies), default=0)
        for left_out in range(count):
            others = [np.delete(run, left_out).tolist() for run in policies]
            tau = kendall_tau([run[left_out] for run in policies], others)
            if tau is not None:
                taus.append(tau)
    return float(np.mean(taus)) if taus else None


_DRAWS = 400
"""Pairs of estimates behind a noise."""


def noise_floor(steps_s: Sequence[Sequence[float]]) -> float:
    """By how much a measured TPOT would differ if all repetitions were made anew,
    relative, median; 0 for a single repetition.

    Whole repetitions are resampled (bootstrap); what few of them hide is made up for by
    ``sqrt(R / (R - 1))``.

    Args:
        steps_s: seconds by repetition and step, [R, steps].
    """
    repetitions = np.array(steps_s)
    count = len(repetitions)
    if count < 2:
        return 0.0

    rng = np.random.default_rng(0)
    estimates = []
    for _ in range(2 * _DRAWS):
        rows = rng.integers(0, count, count)
        estimates.append(float(np.median(repetitions[rows], axis=0).mean()))
    first = np.array(estimates[:_DRAWS])
    second = np.array(estimates[_DRAWS:])
    mean = 0.5 * (first + second)
    apart = np.abs(first - second) / mean
    widening = np.sqrt(count / (count - 1))
    return float(np.median(apart) * widening)

"""Cells of a validation: what was measured, what was predicted, the errors, and what
they show.

The unit of repetition is a run, made anew: steps of one run share the machine's speed
meanwhile and whatever disturbed it, so a hundred of them are not a hundred
measurements. Two means may be proven closer than a margin (TOST, which a lack of data
cannot pass, unlike a test for a difference); two policies have an order only where
their repetitions show one (a paired t-test), and orders are compared by Kendall's tau.
`tests/evidence/test_py` holds each to its level under drift and correlated
errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from moesim.evidence.validation.drift import TERMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


MARGIN = 0.05
"""Of the equivalence test."""
FIGURES = (
    "tpot_s",
    "tpot_p50_s",
    "tpot_p95_s",
    "ttft_s",
    "hits",
    "delayed_hits",
    "misses",
    "planning_s",
    "makespan_s",
)
HIT_COUNTS = ("hits", "delayed_hits", "misses")


_PREDICTED = (
    "predicted",
    "means_tpot_s",
    "decisions_equal",
    "predicted_steps_s",
    "predicted_terms_s",
)
"""Fields of a cell that one simulation fills."""


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


@dataclass(slots=True)
class Cell:
    """One cell: what was measured, in every repetition, and what was predicted.

    Attributes:
        coordinates: where it lies in the grid.
        timing_free: no decision depends on when copies land, so hits must be equal.
        extrapolated: the experts' size was not calibrated.
        measured: figures of each repetition; see `FIGURES`, with ``busy_s`` and
            ``bytes`` by lane and ``terms``.
        predicted: figures of the simulation, mean over replications.
        means_tpot_s: TPOT of the simulation with mean operation times.
        steps_s: measured seconds of each step after the first, by repetition.
        predicted_steps_s: the same, predicted, mean over replications.
        predicted_terms_s: seconds of each step, predicted, by term of
            `moesim.evidence.validation.drift.TERMS`.
        drift: by term, by how much longer the reference run that is most like this cell
            took meanwhile than when the profile was calibrated; None where that is
            unknown.
        decisions_equal: whether the first repetition computed every expert where, and
            made the copies that, the simulation with mean operation times did.
    """

    coordinates: Coordinates
    timing_free: bool
    extrapolated: bool
    measured: list[dict[str, Any]] = field(default_factory=list)
    predicted: dict[str, Any] = field(default_factory=dict)
    means_tpot_s: float | None = None
    steps_s: list[list[float]] = field(default_factory=list)
    predicted_steps_s: list[float] = field(default_factory=list)
    predicted_terms_s: dict[str, list[float]] = field(default_factory=dict)
    drift: dict[str, float] | None = None
    decisions_equal: bool | None = None

    @property
    def is_known(self) -> bool:
        """Whether it was measured and predicted."""
        return bool(self.measured and self.predicted)

    def last_run(self) -> dict[str, Any]:
        """The last repetition as plain values; with the first one, the prediction."""
        line: dict[str, Any] = {
            "coordinates": list(self.coordinates),
            "measured": self.measured[-1],
            "steps_s": self.steps_s[-1],
        }
        if len(self.measured) == 1:
            line |= {name: getattr(self, name) for name in _PREDICTED}
        return line

    def restore(self, line: Mapping[str, Any]) -> None:
        """Take back what `last_run` returned."""
        self.measured.append(line["measured"])
        self.steps_s.append(line["steps_s"])
        for name in _PREDICTED:
            if name in line:
                setattr(self, name, line[name])

    def steps_measured_s(self) -> np.ndarray:
        """Seconds of each step after the first, median over repetitions, float64 [steps
        - 1].

        The same step does the same work in all of them, so what one has more than the
        others is not its own: other tenants of a machine come in bursts of half a
        second.
        """
        return np.asarray(np.median(self.steps_s, axis=0))

    def measured_value(self, key: str) -> float | None:
        """Return a measured figure: median over repetitions; TPOT is the mean of
        `steps_measured_s`.
        """
        # Medians by step are steadier than the median of runs' own means. A percentile
        # is that of single runs, as predicted: medians scatter less than any run.
        steps_s = self.steps_measured_s()
        if key == "tpot_s" and len(steps_s):
            return float(steps_s.mean())
        values = [run[key] for run in self.measured]
        return None if None in values else float(np.median(values))

    def error(self, key: str) -> float | None:
        """Predicted over measured, minus one; None where there is no such figure."""
        measured = self.measured_value(key)
        if not measured:
            return None
        return float(self.predicted[key] / measured - 1.0)

    def error_without_drift(self, key: str) -> float | None:
        """Return the error of ``ttft_s`` or ``tpot_s``, had every term taken as long as
        when the profile was calibrated.
        """
        error = self.error(key)
        if error is None or self.drift is None:
            return None

        # TTFT is the first step, TPOT all others.
        steps = slice(0, 1) if key == "ttft_s" else slice(1, None)
        predicted_s = 0.0
        drifted_s = 0.0
        for term, seconds in self.predicted_terms_s.items():
            term_s = sum(seconds[steps])
            predicted_s += term_s
            drifted_s += term_s * (1.0 + self.drift[term])
        return (1.0 + error) * drifted_s / predicted_s - 1.0

    def noise_floor(self) -> float:
        """Return by how much the measured TPOT would differ if all repetitions were
        made anew.
        """

        def tpot_s(runs: np.ndarray) -> float:
            return float(np.median(runs, axis=0).mean())

        return estimate_noise(np.array(self.steps_s), tpot_s)

    def repetition_difference(self) -> float:
        """Return by how much single repetitions of this cell differ."""
        # A run of one step has no TPOT.
        tpot_s = [run["tpot_s"] for run in self.measured if run["tpot_s"]]
        return noise_floor(tpot_s)

    def hits_equal(self) -> bool:
        """Tell whether every repetition counted the hits that were predicted."""
        return all(
            run[key] == self.predicted[key]
            for run in self.measured
            for key in HIT_COUNTS
        )

    def term_errors(self) -> dict[str, float]:
        """Predicted minus measured seconds of each term, as a share of the measured
        makespan.
        """
        # A share of the makespan: a term of microseconds may be off by half.
        makespan_s = self.measured_value("makespan_s") or 1.0
        errors = {}
        for term in TERMS:
            repetitions_s = [run["terms"][term] for run in self.measured]
            measured_s = np.median(repetitions_s)
            difference_s = self.predicted["terms"][term] - measured_s
            errors[term] = float(difference_s) / makespan_s
        return errors

    def to_json(self) -> dict[str, Any]:
        """Return everything, with the comparisons."""
        steps_s = self.steps_measured_s()
        step_errors = np.asarray(self.predicted_steps_s) / steps_s - 1.0
        return {
            **self.coordinates._asdict(),
            "timing_free": self.timing_free,
            "extrapolated": self.extrapolated,
            "measured": self.measured,
            "tpot_measured_s": self.measured_value("tpot_s"),
            "predicted": self.predicted,
            "means_tpot_s": self.means_tpot_s,
            "tpot_error": self.error("tpot_s"),
            "tpot_p50_error": self.error("tpot_p50_s"),
            "tpot_p95_error": self.error("tpot_p95_s"),
            "ttft_error": self.error("ttft_s"),
            "drift": self.drift,
            "tpot_error_at_speed": self.error_without_drift("tpot_s"),
            "ttft_error_at_speed": self.error_without_drift("ttft_s"),
            # Rounded, or this list alone would be most of the file.
            "step_errors": step_errors.round(4).tolist(),
            "noise_floor": self.noise_floor(),
            "repetitions_differ": self.repetition_difference(),
            "hits_equal": self.hits_equal(),
            "decisions_equal": self.decisions_equal,
            "tost": self._equivalence(),
            "terms": self.term_errors(),
        }

    def _equivalence(self) -> dict[str, Any] | None:
        """Whether the prediction is equivalent to the repetitions; None without two of
        these, or without steps after the first.
        """
        if len(self.steps_s) < 2 or not self.steps_s[0]:
            return None
        return equivalent(
            float(np.mean(self.predicted_steps_s)),
            np.mean(self.steps_s, axis=1),
            margin=MARGIN,
        )._asdict()


AT_SPEED = "_at_speed"
"""Ends the keys of errors without the machine's drift."""


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


_ERRORS = ("tpot_error", "ttft_error", "tpot_p95_error")
_COLUMNS = (
    *Coordinates._fields,
    *("timing_free", "extrapolated", "hits_equal", "tost", "terms"),
    *("measured", "predicted", "tpot_measured_s", "noise_floor", "repetitions_differ"),
    *_ERRORS,
    *(f"{error}{AT_SPEED}" for error in _ERRORS),
)
"""What the summary reads of a cell."""


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return figures over all cells; `held_out` and `calibrated` are those of sizes
    that calibration had not, and had.
    """
    frame = pd.DataFrame(cells, columns=list(_COLUMNS))
    # Where timing decides, hits may differ by what copies took; nowhere else.
    free = frame["hits_equal"][frame["timing_free"].astype(bool)].tolist()
    tests = [test["equivalent"] for test in frame["tost"] if test is not None]
    terms = {
        term: _known(frame["terms"].map(lambda of, term=term: abs(of[term])).median())
        for term in TERMS
    }
    errors = errors_of(frame)
    # A single repetition has no noise floor, which is not a floor of zero.
    repeated = frame[frame["measured"].map(len) > 1]
    floor = _known(repeated["noise_floor"].median()) or 0.0
    over_noise = (errors["tpot_error_median"] or 0.0) / floor if floor else None
    known = repeated[repeated["tpot_error"].notna()]
    # An error below the floor may be the measurement's as well as the model's.
    below = known["tpot_error"].astype(float).abs() < known["noise_floor"].astype(float)
    extrapolated = frame["extrapolated"].astype(bool)
    return {
        **errors,
        "hits_equal": all(free) if free else None,
        "hits_compared": len(free),
        **_order_of_policies(frame),
        "noise_floor": floor,
        "noise_floor_max": _known(frame["noise_floor"].max()),
        "repetitions_differ": _known(frame["repetitions_differ"].median()),
        "below_noise_share": _known(below.mean()),
        "error_over_noise": over_noise,
        "tost_pass_share": _known(pd.Series(tests, dtype=float).mean()),
        "terms": terms,
        "largest_term": max(TERMS, key=lambda term: terms[term] or 0.0),
        "at_speed": errors_of(frame, AT_SPEED),
        "held_out": errors_of(frame[extrapolated]),
        "calibrated": errors_of(frame[~extrapolated]),
        "ssd": errors_of(frame[frame["host_ratio"] < 1]),
        "same_work": _same_work(frame),
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
        "kendall_tau_min": min(taus, default=None),
        "kendall_tau_repeated": repeated_tau(groups),
    }


def _same_work(frame: pd.DataFrame) -> dict[str, Any]:
    """By what measured times differ of cells that do the same work, pair by pair: no
    prediction can be nearer.

    A prediction is a function of the work, so the same work is what is predicted to
    take the very same time.
    """
    timed = frame[frame["tpot_measured_s"].astype(float) > 0]
    work = [
        f"{cell['tpot_s']} {cell['ttft_s']}" for cell in timed["predicted"].tolist()
    ]
    grouped = timed.assign(work=work).groupby(["trace", "shape", "batch", "work"])
    apart = [
        max(pair) / min(pair) - 1.0
        for _, times_s in grouped["tpot_measured_s"]
        for pair in combinations(times_s.tolist(), 2)
    ]
    return {
        "count": len(apart),
        "tpot_differs_median": float(np.median(apart)) if apart else None,
        "tpot_differs_max": max(apart, default=None),
    }


def errors_of(frame: pd.DataFrame, ending: str = "") -> dict[str, Any]:
    """Return median and largest errors of some cells.

    Args:
        frame: some cells.
        ending: `AT_SPEED` for errors without the machine's drift.
    """
    errors: dict[str, Any] = {"count": len(frame)}
    # Sizes show how far a prediction is off; the signed median, to which side. Without
    # drift there is no 95th percentile: terms are known by step, not by run.
    for name in _ERRORS[:2] if ending else _ERRORS:
        signed = frame[f"{name}{ending}"].astype(float)
        errors[f"{name}_median"] = _known(signed.abs().median())
        errors[f"{name}_max"] = _known(signed.abs().max())
    signed = frame[f"tpot_error{ending}"].astype(float)
    errors["tpot_error_signed_median"] = _known(signed.median())
    return errors


def _known(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)


# -- do they agree? --------------------------------------------------------------------

LEVEL = 0.05
"""Chance of each decision to be wrong where it matters: to prove an equivalence that is
not there, to order equal policies.
"""
_NO_SCATTER = 1e-12


class Equivalence(NamedTuple):
    """Result of two one-sided tests: `p_value` is the larger of the two."""

    ratio: float
    p_value: float
    equivalent: bool


def equivalent(
    predicted: float, repetitions: Sequence[float] | np.ndarray, *, margin: float = 0.05
) -> Equivalence:
    """Test whether a prediction differs by less than a factor of ``1 + margin`` from
    what it predicts, geometric mean.

    Args:
        predicted: by the simulation, which answers the same however often it is asked.
        repetitions: the same, measured in each run.
        margin: relative.

    Raises:
        ValueError: fewer than two repetitions.

    Source: two one-sided t-tests, Schuirmann (1987).
    """
    measured = np.asarray(repetitions, np.float64)
    count = len(measured)
    if count < 2:
        raise ValueError(f"at least two repetitions are needed, found {count}")

    # Logarithms: half as fast is as far away as twice as fast.
    apart = np.log(predicted / measured)
    mean = float(apart.mean())
    ratio = float(np.exp(mean))
    most = float(np.log1p(margin))
    error = float(apart.std(ddof=1)) / np.sqrt(count)
    if error < _NO_SCATTER:
        # Without scatter there is nothing to test; the means are what they are.
        inside = abs(mean) < most
        return Equivalence(ratio, 0.0 if inside else 1.0, inside)

    # Equivalent only if both one-sided tests reject: the larger p-value decides.
    above = special.stdtr(count - 1, -(mean + most) / error)
    below = special.stdtr(count - 1, (mean - most) / error)
    p_value = float(max(above, below))
    return Equivalence(ratio, p_value, p_value < LEVEL)


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


def noise_floor(repetitions: Sequence[float]) -> float:
    """Median relative difference between two repetitions of a run, over all pairs; 0
    where it was not repeated.
    """
    apart = [
        # Over their mean: neither of two repetitions is the true one.
        abs(first - second) / (0.5 * (first + second))
        for first, second in combinations(repetitions, 2)
    ]
    return float(np.median(apart)) if apart else 0.0


_DRAWS = 400
"""Pairs of estimates behind a noise."""


def estimate_noise(
    repetitions: np.ndarray, estimate: Callable[[np.ndarray], float]
) -> float:
    """Relative difference between two estimates from as many repetitions each, median.

    Whole repetitions are resampled (bootstrap); what few of them hide is made up for by
    ``sqrt(R / (R - 1))``.

    Args:
        repetitions: float64 [R, n], R identical runs.
        estimate: of such an array.

    Returns:
        0.0 for a single repetition.
    """
    count = len(repetitions)
    if count < 2:
        return 0.0

    rng = np.random.default_rng(0)
    estimates = []
    for _ in range(2 * _DRAWS):
        rows = rng.integers(0, count, count)
        estimates.append(estimate(repetitions[rows]))
    first = np.array(estimates[:_DRAWS])
    second = np.array(estimates[_DRAWS:])
    mean = 0.5 * (first + second)
    apart = np.abs(first - second) / mean
    widening = np.sqrt(count / (count - 1))
    return float(np.median(apart) * widening)

"""Cells of a validation: what was measured, what was predicted, and the errors.

`moesim.validation.summary` sums them up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from moesim.validation import agreement
from moesim.validation.time_breakdown import TERMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MARGIN = 0.05
"""Of the equivalence test."""
_OF_STEPS: Final[Mapping[str, Callable[[np.ndarray], Any]]] = {
    "tpot_s": np.mean,
    "tpot_p50_s": np.median,
    "tpot_p95_s": lambda steps_s: np.quantile(steps_s, 0.95),
}
"""Figures that follow from the seconds of steps after the first."""
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
        replications_s: TPOT of each replication.
        means_tpot_s: TPOT of the simulation with mean operation times.
        steps_s: measured seconds of each step after the first, by repetition.
        predicted_steps_s: the same, predicted, mean over replications.
        predicted_terms_s: seconds of each step, predicted, by term of
            `moesim.validation.time_breakdown.TERMS`.
        drift: by term, by how much longer the reference run that is most like this cell
            took meanwhile than when the profile was calibrated; None where that is
            unknown.
    """

    coordinates: Coordinates
    timing_free: bool
    extrapolated: bool
    measured: list[dict[str, Any]] = field(default_factory=list)
    predicted: dict[str, Any] = field(default_factory=dict)
    replications_s: list[float] = field(default_factory=list)
    means_tpot_s: float | None = None
    steps_s: list[list[float]] = field(default_factory=list)
    predicted_steps_s: list[float] = field(default_factory=list)
    predicted_terms_s: dict[str, list[float]] = field(default_factory=dict)
    drift: dict[str, float] | None = None

    def steps_measured_s(self) -> np.ndarray:
        """Seconds of each step after the first, median over repetitions, float64 [steps
        - 1].

        The same step does the same work in all of them, so what one has more than the
        others is not its own: other tenants of a machine come in bursts of half a
        second.
        """
        return np.asarray(np.median(self.steps_s, axis=0))

    def measured_value(self, key: str) -> float | None:
        """Return a measured figure: median over repetitions; those of steps after the
        first, from `steps_measured_s`.
        """
        # Medians by step are steadier than the median of runs' own figures.
        steps_s = self.steps_measured_s()
        if key in _OF_STEPS and len(steps_s):
            return float(_OF_STEPS[key](steps_s))
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

        return agreement.estimate_noise(np.array(self.steps_s), tpot_s)

    def repetition_difference(self) -> float:
        """Return by how much single repetitions of this cell differ."""
        # A run of one step has no TPOT.
        tpot_s = [run["tpot_s"] for run in self.measured if run["tpot_s"]]
        return agreement.noise_floor([tpot_s])

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
        interval = None
        if self.replications_s:
            interval = [min(self.replications_s), max(self.replications_s)]
        return {
            **self.coordinates._asdict(),
            "timing_free": self.timing_free,
            "extrapolated": self.extrapolated,
            "measured": self.measured,
            "tpot_measured_s": self.measured_value("tpot_s"),
            "predicted": self.predicted,
            "predicted_tpot_interval_s": interval,
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
            **self._tests_of_steps(),
            "terms": self.term_errors(),
        }

    def _tests_of_steps(self) -> dict[str, Any]:
        """Compare predicted and measured seconds of steps; None for a single step."""
        steps_s = self.steps_measured_s()
        if len(steps_s) < 2:
            return {"tost": None, "ks": None}
        same_means = agreement.equivalent(
            self.predicted_steps_s, steps_s, margin=MARGIN
        )
        # Single measurements, not medians: distributions are compared, not means.
        same_distribution = agreement.kolmogorov_smirnov(
            self.predicted_steps_s, np.concatenate(self.steps_s)
        )
        return {
            "tost": same_means._asdict(),
            "ks": same_distribution._asdict(),
        }

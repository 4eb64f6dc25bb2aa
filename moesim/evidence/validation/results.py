"""Cells of a validation: what was measured, what was predicted, and the errors.

`moesim.evidence.validation.results` sums them up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.evidence.validation import agreement
from moesim.evidence.validation.time_breakdown import TERMS
from moesim.hwprofiles.schema import ProfileError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
    "replications_s",
    "means_tpot_s",
    "predicted_steps_s",
    "replication_steps_s",
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
        replications_s: TPOT of each replication.
        means_tpot_s: TPOT of the simulation with mean operation times.
        steps_s: measured seconds of each step after the first, by repetition.
        predicted_steps_s: the same, predicted, mean over replications.
        predicted_terms_s: seconds of each step, predicted, by term of
            `moesim.evidence.validation.time_breakdown.TERMS`.
        drift: by term, by how much longer the reference run that is most like this cell
            took meanwhile than when the profile was calibrated; None where that is
            unknown.
        replication_steps_s: as `predicted_steps_s`, by replication.
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
    replication_steps_s: list[list[float]] = field(default_factory=list)

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
        """Compare prediction and repetitions; None without two of these, or without
        steps after the first.
        """
        runs_s = [np.asarray(steps_s) for steps_s in self.steps_s]
        if len(runs_s) < 2 or not len(runs_s[0]):
            return {"tost": None, "ks": None}
        same_means = agreement.equivalent(
            float(np.mean(self.predicted_steps_s)),
            [float(run_s.mean()) for run_s in runs_s],
            margin=MARGIN,
        )
        same_scatter = None
        if len(self.replication_steps_s) > 1 and len(runs_s[0]) > 1:
            simulated_s = [np.asarray(steps_s) for steps_s in self.replication_steps_s]
            same_scatter = agreement.same_scatter(simulated_s, runs_s)._asdict()
        return {"tost": same_means._asdict(), "ks": same_scatter}


AT_SPEED = "_at_speed"
"""Ends the keys of errors without the machine's drift."""

JsonCell = dict[str, Any]


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


def joined(result: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Sum up a validation together with an earlier one by the same profile.

    Args:
        result, earlier: as `Validation.to_json` made them.

    Raises:
        ProfileError: they were predicted by different profiles.
    """
    earlier_digest = earlier["config"]["hw_digest"]
    digest = result["config"]["hw_digest"]
    if earlier_digest != digest:
        raise ProfileError(
            f"the earlier validation is by another profile: expected digest {digest},"
            f" found {earlier_digest}"
        )

    cells = earlier["cells"] + result["cells"]
    seconds = earlier["config"]["seconds"] + result["config"]["seconds"]
    config = {
        **result["config"],
        "seconds": seconds,
        "earlier": earlier["config"],
    }
    # Both note the same things about the machine; each is worth one line.
    warnings = dict.fromkeys(earlier["warnings"] + result["warnings"])
    return {
        **summary(cells),
        "cells": cells,
        "config": config,
        "warnings": list(warnings),
    }


def summary(cells: Sequence[JsonCell]) -> dict[str, Any]:
    """Return figures over all cells; `held_out` and `calibrated` are those of sizes
    that calibration had not, and had.
    """
    # Where timing decides, hits may differ by what copies took; nowhere else.
    free = [cell["hits_equal"] for cell in cells if cell["timing_free"]]
    tests = [cell["tost"] for cell in cells if cell["tost"] is not None]
    passed = [test["equivalent"] for test in tests]

    term_errors = {}
    for term in TERMS:
        sizes = [abs(cell["terms"][term]) for cell in cells]
        term_errors[term] = _median(sizes)
    largest_term = None
    if cells:
        largest_term = max(TERMS, key=lambda term: term_errors[term] or 0.0)

    errors = errors_of(cells)
    # A single repetition has no noise floor, which is not a floor of zero.
    repeated = [cell for cell in cells if _is_repeated(cell)]
    floor = _median(_floors(repeated)) or 0.0
    over_noise = None
    if floor:
        over_noise = (errors["tpot_error_median"] or 0.0) / floor

    extrapolated = [cell for cell in cells if cell["extrapolated"]]
    calibrated = [cell for cell in cells if not cell["extrapolated"]]
    differences = [cell["repetitions_differ"] for cell in cells]
    with_ssd = [cell for cell in cells if cell["host_ratio"] < 1]
    return {
        **errors,
        "hits_equal": all(free) if free else None,
        "hits_compared": len(free),
        **_order_of_policies(cells),
        "noise_floor": floor,
        "noise_floor_max": max(_floors(cells), default=None),
        "repetitions_differ": _median(differences),
        "below_noise_share": _below_noise_share(cells),
        "error_over_noise": over_noise,
        "tost_pass_share": _mean(passed),
        "terms": term_errors,
        "largest_term": largest_term,
        "at_speed": errors_of(cells, AT_SPEED),
        "held_out": errors_of(extrapolated),
        "calibrated": errors_of(calibrated),
        "ssd": errors_of(with_ssd),
        "same_work": _same_work(cells),
        "by": {key: _errors_by(cells, key) for key in Coordinates._fields},
    }


def _order_of_policies(cells: Sequence[JsonCell]) -> dict[str, Any]:
    """Compare orders of policies where everything else is the same."""
    others = [key for key in Coordinates._fields if key != "policy"]
    by_setting: dict[tuple[Any, ...], list[JsonCell]] = {}
    for cell in cells:
        setting = tuple(cell[key] for key in others)
        by_setting.setdefault(setting, []).append(cell)

    taus = []
    groups = []
    for group in by_setting.values():
        repetitions = [_tpot_of_runs(cell) for cell in group]
        # Files of two validations may differ in how often they repeated.
        count = min(map(len, repetitions))
        repetitions = [seconds[:count] for seconds in repetitions]
        predicted_s = [cell["predicted"]["tpot_s"] for cell in group]
        tau = agreement.kendall_tau(predicted_s, repetitions)
        if tau is not None:
            taus.append(tau)
        groups.append(repetitions)
    return {
        "kendall_tau": _mean(taus),
        "kendall_tau_min": min(taus, default=None),
        "kendall_tau_repeated": agreement.repeated_tau(groups),
    }


def _below_noise_share(cells: Sequence[JsonCell]) -> float | None:
    """Share of repeated cells whose error is smaller than their noise floor."""
    # An error below the floor may be the measurement's as well as the model's.
    below = [
        abs(cell["tpot_error"]) < cell["noise_floor"]
        for cell in cells
        if cell["tpot_error"] is not None and _is_repeated(cell)
    ]
    return _mean(below)


def _same_work(cells: Sequence[JsonCell]) -> dict[str, Any]:
    """By what measured times differ of cells that do the same work, pair by pair: no
    prediction can be nearer.

    A prediction is a function of the work, so the same work is what is predicted to
    take the very same time.
    """
    by_work: dict[tuple[Any, ...], list[float]] = {}
    for cell in cells:
        if not cell["tpot_measured_s"]:
            continue
        predicted = cell["predicted"]
        work = (
            cell["trace"],
            cell["shape"],
            cell["batch"],
            predicted["tpot_s"],
            predicted["ttft_s"],
        )
        by_work.setdefault(work, []).append(cell["tpot_measured_s"])

    apart = [
        max(pair) / min(pair) - 1.0
        for times_s in by_work.values()
        for pair in combinations(times_s, 2)
    ]
    return {
        "count": len(apart),
        "tpot_differs_median": _median(apart),
        "tpot_differs_max": max(apart, default=None),
    }


def _errors_by(cells: Sequence[JsonCell], key: str) -> dict[str, dict[str, Any]]:
    """Errors of the cells that share a coordinate, by its value."""
    values = dict.fromkeys(cell[key] for cell in cells)
    errors = {}
    for value in values:
        members = [cell for cell in cells if cell[key] == value]
        # JSON knows only texts as keys.
        errors[f"{value}"] = errors_of(members)
    return errors


def errors_of(cells: Sequence[JsonCell], ending: str = "") -> dict[str, Any]:
    """Return median and largest errors of some cells.

    Args:
        cells: some cells.
        ending: `AT_SPEED` for errors without the machine's drift.
    """
    # Without drift there is no 95th percentile: terms are known by step, not by run.
    figures = ("tpot", "ttft") if ending else ("tpot", "ttft", "tpot_p95")
    errors: dict[str, Any] = {"count": len(cells)}
    # Sizes show how far a prediction is off; the signed median, to which side.
    for figure in figures:
        sizes = [abs(error) for error in _known(cells, f"{figure}_error{ending}")]
        errors[f"{figure}_error_median"] = _median(sizes)
        errors[f"{figure}_error_max"] = max(sizes, default=None)
    signed = _known(cells, f"tpot_error{ending}")
    errors["tpot_error_signed_median"] = _median(signed)
    return errors


def _known(cells: Sequence[JsonCell], key: str) -> list[float]:
    # Files of earlier versions lack some figures.
    values = (cell.get(key) for cell in cells)
    return [value for value in values if value is not None]


def _floors(cells: Sequence[JsonCell]) -> list[float]:
    return [cell["noise_floor"] for cell in cells]


def _is_repeated(cell: JsonCell) -> bool:
    return len(cell["measured"]) > 1


def _tpot_of_runs(cell: JsonCell) -> list[float]:
    return [run["tpot_s"] for run in cell["measured"] if run["tpot_s"]]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None

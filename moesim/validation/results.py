"""What a validation found: cells with what was measured and predicted, and the figures
that sum them up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from moesim.analysis.time_breakdown import TERMS
from moesim.hwprofiles.errors import ProfileError
from moesim.validation import agreement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MARGIN = 0.05
"""Of the equivalence test."""
_OF_STEPS: Final[Mapping[str, Callable[[np.ndarray], Any]]] = {
    "tpot_s": np.mean,
    "tpot_p50_s": np.median,
    "tpot_p95_s": lambda steps_s: np.quantile(steps_s, 0.95),
}
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


class Place(NamedTuple):
    """A cell's coordinates. `host_ratio` is the share of experts that host memory
    holds; 1 needs no SSD.
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
        place: coordinates.
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
            `moesim.analysis.time_breakdown.TERMS`.
        drift: by term, by how much longer the reference run that is most like this cell
            took meanwhile than when the profile was calibrated; None where that is
            unknown.
    """

    place: Place
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

    def found(self, key: str) -> float | None:
        """A measured figure: median over repetitions; those of steps after the first,
        from `steps_measured_s`.
        """
        steps_s = self.steps_measured_s()
        if key in _OF_STEPS and len(steps_s):
            return float(_OF_STEPS[key](steps_s))
        values = [one[key] for one in self.measured]
        return None if None in values else float(np.median(values))

    def error(self, key: str) -> float | None:
        """Predicted over measured, minus one; None where there is no such figure."""
        measured = self.found(key)
        return None if not measured else float(self.predicted[key] / measured - 1.0)

    def error_at_speed(self, key: str) -> float | None:
        """The error of ``ttft_s`` or ``tpot_s``, had every term taken as long as when
        the profile was calibrated.
        """
        error = self.error(key)
        if error is None or self.drift is None:
            return None
        steps = slice(0, 1) if key == "ttft_s" else slice(1, None)
        terms_s = {
            name: sum(seconds[steps])
            for name, seconds in self.predicted_terms_s.items()
        }
        now_s = sum(
            seconds * (1.0 + self.drift[name]) for name, seconds in terms_s.items()
        )
        return (1.0 + error) * now_s / sum(terms_s.values()) - 1.0

    def floor(self) -> float:
        """By how much the measured TPOT would differ if all repetitions were made
        anew.
        """
        return agreement.estimate_noise(
            np.array(self.steps_s), lambda runs: float(np.median(runs, axis=0).mean())
        )

    def repetitions_differ(self) -> float:
        """By how much single repetitions of this cell differ."""
        return agreement.noise_floor(
            [[one["tpot_s"] for one in self.measured if one["tpot_s"]]]
        )

    def hits_equal(self) -> bool:
        """Whether every repetition counted the hits that were predicted."""
        keys = ("hits", "delayed_hits", "misses")
        return all(
            one[key] == self.predicted[key] for one in self.measured for key in keys
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, with the comparisons."""
        steps_s = self.steps_measured_s()
        some = len(steps_s) > 1
        test = (
            agreement.equivalent(self.predicted_steps_s, steps_s, margin=MARGIN)
            if some
            else None
        )
        distance = (
            agreement.kolmogorov_smirnov(
                self.predicted_steps_s, np.concatenate(self.steps_s)
            )
            if some
            else None
        )
        return {
            **self.place._asdict(),
            "timing_free": self.timing_free,
            "extrapolated": self.extrapolated,
            "measured": self.measured,
            "tpot_measured_s": self.found("tpot_s"),
            "predicted": self.predicted,
            "predicted_tpot_interval_s": (
                [
                    min(self.replications_s),
                    max(self.replications_s),
                ]
                if self.replications_s
                else None
            ),
            "means_tpot_s": self.means_tpot_s,
            "tpot_error": self.error("tpot_s"),
            "tpot_p50_error": self.error("tpot_p50_s"),
            "tpot_p95_error": self.error("tpot_p95_s"),
            "ttft_error": self.error("ttft_s"),
            "drift": self.drift,
            "tpot_error_at_speed": self.error_at_speed("tpot_s"),
            "ttft_error_at_speed": self.error_at_speed("ttft_s"),
            "step_errors": (
                (np.asarray(self.predicted_steps_s) / steps_s - 1.0).round(4).tolist()
            ),
            "noise_floor": self.floor(),
            "repetitions_differ": self.repetitions_differ(),
            "hits_equal": self.hits_equal(),
            "tost": None if test is None else test._asdict(),
            "ks": None if distance is None else distance._asdict(),
            "terms": self.term_errors(),
        }

    def term_errors(self) -> dict[str, float]:
        """Predicted minus measured seconds of each term, as a share of the measured
        makespan.
        """
        makespan_s = self.found("makespan_s") or 1.0
        return {
            name: (
                float(
                    self.predicted["terms"][name]
                    - np.median([one["terms"][name] for one in self.measured])
                )
                / makespan_s
            )
            for name in TERMS
        }


@dataclass(slots=True)
class Validation:
    """A finished grid."""

    cells: list[Cell]
    config: dict[str, Any]
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Cells and the summary over them."""
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
    one, other = (part["config"]["hw_digest"] for part in (earlier, result))
    if one != other:
        raise ProfileError(
            f"the earlier validation is by another profile: expected digest {other},"
            f" found {one}"
        )
    cells = earlier["cells"] + result["cells"]
    config = {
        **result["config"],
        "seconds": earlier["config"]["seconds"] + result["config"]["seconds"],
    }
    return {
        **summary(cells),
        "cells": cells,
        "config": config | {"earlier": earlier["config"]},
        "warnings": [*dict.fromkeys(earlier["warnings"] + result["warnings"])],
    }


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures over all cells; `held_out` and `calibrated` are those of sizes that
    calibration had not, and had.
    """
    free = [cell["hits_equal"] for cell in cells if cell["timing_free"]]
    passed = [cell["tost"]["equivalent"] for cell in cells if cell["tost"] is not None]
    drawn: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        drawn.setdefault(
            tuple(cell[key] for key in Place._fields if key != "policy"), []
        ).append(cell)
    floor = (
        _median([cell["noise_floor"] for cell in cells if len(cell["measured"]) > 1])
        or 0.0
    )
    groups = list(drawn.values())
    floors = [max(floor, *(cell["noise_floor"] for cell in group)) for group in groups]
    taus = [
        tau
        for group, closest in zip(groups, floors, strict=True)
        if (
            tau := agreement.kendall_tau(
                [cell["predicted"]["tpot_s"] for cell in group],
                [cell["tpot_measured_s"] for cell in group],
                floor=closest,
            )
        )
        is not None
    ]
    again = [
        [[one["tpot_s"] for one in cell["measured"] if one["tpot_s"]] for cell in group]
        for group in groups
    ]
    below = [
        abs(cell["tpot_error"]) < cell["noise_floor"]
        for cell in cells
        if cell["tpot_error"] is not None and len(cell["measured"]) > 1
    ]
    blamed = {
        name: _median([abs(cell["terms"][name]) for cell in cells]) for name in TERMS
    }
    return {
        **_errors(cells),
        "hits_equal": all(free) if free else None,
        "hits_compared": len(free),
        "kendall_tau": float(np.mean(taus)) if taus else None,
        "kendall_tau_min": min(taus, default=None),
        "kendall_tau_repeated": agreement.repeated_tau(again, floors),
        "noise_floor": floor,
        "noise_floor_max": max((cell["noise_floor"] for cell in cells), default=None),
        "repetitions_differ": _median([cell["repetitions_differ"] for cell in cells]),
        "below_noise_share": float(np.mean(below)) if below else None,
        "error_over_noise": (
            None if not floor else (_errors(cells)["tpot_error_median"] or 0.0) / floor
        ),
        "tost_pass_share": float(np.mean(passed)) if passed else None,
        "terms": blamed,
        "largest_term": (
            max(blamed, key=lambda name: blamed[name] or 0.0) if cells else None
        ),
        "at_speed": _errors(cells, "_at_speed"),
        "held_out": _errors([cell for cell in cells if cell["extrapolated"]]),
        "calibrated": _errors([cell for cell in cells if not cell["extrapolated"]]),
        "ssd": _errors([cell for cell in cells if cell["host_ratio"] < 1]),
        "same_work": _same_work(cells),
        "by": {key: _by(cells, key) for key in Place._fields},
    }


def _same_work(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By what measured times differ of cells that do the same work, pair by pair: no
    prediction can be nearer.

    A prediction is a function of the work, so the same work is what is predicted to
    take the very same time.
    """
    alike: dict[tuple[Any, ...], list[float]] = {}
    for cell in cells:
        if cell["tpot_measured_s"]:
            times_s = (cell["predicted"]["tpot_s"], cell["predicted"]["ttft_s"])
            key = (cell["trace"], cell["shape"], cell["batch"], *times_s)
            alike.setdefault(key, []).append(cell["tpot_measured_s"])
    apart = [
        max(pair) / min(pair) - 1.0
        for times in alike.values()
        for pair in combinations(times, 2)
    ]
    return {
        "count": len(apart),
        "tpot_differs_median": _median(apart),
        "tpot_differs_max": max(apart, default=None),
    }


def _by(cells: Sequence[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    """Errors of the cells that share a coordinate, by its value."""
    values = dict.fromkeys(cell[key] for cell in cells)
    return {
        f"{value}": _errors([cell for cell in cells if cell[key] == value])
        for value in values
    }


def _errors(cells: Sequence[dict[str, Any]], which: str = "") -> dict[str, Any]:
    """Errors of some cells; `which` is ``_at_speed`` for those without the machine's
    drift.
    """
    found: dict[str, Any] = {"count": len(cells)}
    for key in ("tpot", "ttft") if which else ("tpot", "ttft", "tpot_p95"):
        values = [
            abs(error)
            for cell in cells
            if (error := cell.get(f"{key}_error{which}")) is not None
        ]
        found[f"{key}_error_median"] = _median(values)
        found[f"{key}_error_max"] = max(values, default=None)
    signed = [
        error for cell in cells if (error := cell.get(f"tpot_error{which}")) is not None
    ]
    found["tpot_error_signed_median"] = _median(signed)
    return found


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None

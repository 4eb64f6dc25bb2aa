"""Sums up a validation: errors over cells, order of policies, what noise explains.

Works on cells as `moesim.validation.results.Cell.to_json` makes them, so that a file of
an earlier validation can be summed up as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.hwprofiles.errors import ProfileError
from moesim.validation import agreement
from moesim.validation.results import Coordinates
from moesim.validation.time_breakdown import TERMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.validation.results import Cell

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
        **_order_of_policies(cells, floor),
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


def _order_of_policies(cells: Sequence[JsonCell], floor: float) -> dict[str, Any]:
    """Compare orders of policies where everything else is the same.

    Args:
        cells: all of them.
        floor: noise floor of the median cell.
    """
    others = [key for key in Coordinates._fields if key != "policy"]
    by_setting: dict[tuple[Any, ...], list[JsonCell]] = {}
    for cell in cells:
        setting = tuple(cell[key] for key in others)
        by_setting.setdefault(setting, []).append(cell)

    taus = []
    floors = []
    repetitions = []
    for group in by_setting.values():
        # Two policies have an order only beyond the noise of the noisier one.
        group_floor = max(floor, *_floors(group))
        predicted_s = [cell["predicted"]["tpot_s"] for cell in group]
        measured_s = [cell["tpot_measured_s"] for cell in group]
        tau = agreement.kendall_tau(
            predicted_s,
            measured_s,
            floor=group_floor,
        )
        if tau is not None:
            taus.append(tau)
        floors.append(group_floor)
        repetitions.append([_tpot_of_runs(cell) for cell in group])
    return {
        "kendall_tau": _mean(taus),
        "kendall_tau_min": min(taus, default=None),
        "kendall_tau_repeated": agreement.repeated_tau(repetitions, floors),
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

"""What is stated before anything is measured: cells, repetitions, aims, what counts.

`docs/measurements/protocol.md` says the same in words, and
`tests/evidence/test_protocol.py`
holds the two together. A change here is another protocol, and needs a new result.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from moesim.base.files import write_text
from moesim.base.inputs import load_json, read_text
from moesim.base.version import git_commit
from moesim.evidence.validation.agreement import LEVEL, measured_order
from moesim.evidence.validation.calibrate import calibrate
from moesim.evidence.validation.grid import validate
from moesim.hwprofiles.calibration.estimates import measured
from moesim.hwprofiles.schema import ProfileError
from moesim.reporting.tables import markdown_table
from moesim.traces.shipped import resolve_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from moesim.evidence.validation.results import Validation
    from moesim.hwprofiles.profile import HardwareProfile


@dataclass(frozen=True)
class Plan:
    """A protocol.

    Attributes:
        sittings: calibrations, each followed by all cells.
        calibrated: whose sizes the experts of calibration have, the larger first.
        trace: routing of the cells.
        shapes: whose sizes the experts of cells have; the last one is held out.
        policies, cache_ratios, batches: all combinations are cells.
        steps: forward passes of a run.
        repetitions: of every run within a sitting.
        median, worst: largest errors beyond the interval of the measurement.
        widest: half the width of an interval above which a cell shows nothing.
        most_lost: share of a run's time that other programs may take.
    """

    sittings: int = 3
    calibrated: tuple[str, ...] = ("olmoe-1b-7b/4", "olmoe-1b-7b/8")
    trace: str = "tiny"
    shapes: tuple[str, ...] = ("olmoe-1b-7b/4", "qwen3-30b-a3b/8")
    policies: tuple[str, ...] = ("all-cpu+none", "on-demand+lru", "greedy+lru")
    cache_ratios: tuple[float, ...] = (0.4,)
    batches: tuple[int, ...] = (1, 4)
    steps: int = 8
    repetitions: int = 5
    median: float = 0.03
    worst: float = 0.08
    widest: float = 0.08
    most_lost: float = 0.03

    @property
    def cells(self) -> int:
        """Cells of one sitting."""
        settings = len(self.shapes) * len(self.cache_ratios) * len(self.batches)
        return settings * len(self.policies)


PLAN: Final = Plan()
"""The one that results in `docs/measurements/` follow."""


_SETTING: Final = ("trace", "shape", "cache_ratio", "host_ratio", "batch")


class CellVerdict(NamedTuple):
    """What one cell of one sitting shows. Times are those of an output token.

    Attributes:
        sitting: its number, from 1.
        cell: shape, policy, cache and batch, in words.
        measured_s, low_s, high_s: median over repetitions, and its 95 % interval.
        predicted_s: before it was measured.
        error: predicted over measured, minus one.
        beyond: by how much the prediction lies outside the interval, relative to the
            measured time; 0 inside.
        lost: share of time that other programs took, median over repetitions.
        excluded: why it does not count; empty where it does.
    """

    sitting: int
    cell: str
    measured_s: float
    low_s: float
    high_s: float
    predicted_s: float
    error: float
    beyond: float
    lost: float
    excluded: str


class Order(NamedTuple):
    """Pairs of policies that repetitions order, and how many of them the prediction
    orders so, too.
    """

    pairs: int
    agreed: int

    @property
    def tau(self) -> float | None:
        """Kendall's; None without a pair."""
        if not self.pairs:
            return None
        return (2 * self.agreed - self.pairs) / self.pairs


class Verdict(NamedTuple):
    """The result of a protocol.

    Attributes:
        cells: of all sittings.
        order: of policies.
        refused: sittings whose calibration was refused, with the reason.
        median, worst: of `CellVerdict.beyond` over cells that count; None without one.
        met: by aim, whether it is met; None where nothing counts.
    """

    cells: list[CellVerdict]
    order: Order
    refused: dict[int, str]
    median: float | None
    worst: float | None
    met: dict[str, bool | None]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            **self._asdict(),
            "cells": [cell._asdict() for cell in self.cells],
            "order": {**self.order._asdict(), "tau": self.order.tau},
        }


def judge(plan: Plan, sittings: Sequence[dict[str, Any]]) -> Verdict:
    """Judge what was measured.

    Args:
        plan: what was stated before.
        sittings: as `moesim.evidence.validation.protocol` writes them.
    """
    cells = []
    refused = {}
    pairs = []
    for number, sitting in enumerate(sittings, start=1):
        if sitting.get("refused"):
            refused[number] = sitting["refused"]
            continue
        measured = sitting["validation"]["cells"]
        cells += [_cell(plan, number, cell) for cell in measured]
        pairs += _pairs(measured)

    counted = [cell.beyond for cell in cells if not cell.excluded]
    median = float(np.median(counted)) if counted else None
    worst = max(counted, default=None)
    order = _order(pairs)
    met = {
        "median": None if median is None else median <= plan.median,
        "worst": None if worst is None else worst <= plan.worst,
        "order": None if order.tau is None else order.tau == 1.0,
        "sittings": len(sittings) - len(refused) >= plan.sittings,
    }
    return Verdict(cells, order, refused, median, worst, met)


def _cell(plan: Plan, sitting: int, cell: dict[str, Any]) -> CellVerdict:
    measured_s, low_s, high_s = interval([run["tpot_s"] for run in cell["measured"]])
    predicted_s = cell["predicted"]["tpot_s"]
    outside_s = max(low_s - predicted_s, predicted_s - high_s, 0.0)
    lost = float(np.median([run.get("lost", 0.0) for run in cell["measured"]]))
    half_width = 0.5 * (high_s - low_s) / measured_s
    excluded = ""
    if lost > plan.most_lost:
        excluded = f"other programs took {100 * lost:.0f} %"
    elif half_width > plan.widest:
        excluded = f"repetitions differ: ±{100 * half_width:.0f} %"
    return CellVerdict(
        sitting=sitting,
        cell=(
            f"{cell['shape']}, {cell['policy']}, cache {cell['cache_ratio']:g}, batch"
            f" {cell['batch']}"
        ),
        measured_s=measured_s,
        low_s=low_s,
        high_s=high_s,
        predicted_s=predicted_s,
        error=predicted_s / measured_s - 1.0,
        beyond=outside_s / measured_s,
        lost=lost,
        excluded=excluded,
    )


def interval(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Median of repetitions with its 95 % interval: Student's t for fewer than six."""
    known = measured(np.asarray(seconds), source="repetitions", date="")
    assert known.interval is not None
    return known.value, *known.interval


_Pair = tuple[dict[str, Any], dict[str, Any]]


def _pairs(cells: Iterable[dict[str, Any]]) -> list[_Pair]:
    """Cells that differ in the policy only."""
    by_setting: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        setting = tuple(cell[key] for key in _SETTING)
        by_setting.setdefault(setting, []).append(cell)
    groups = by_setting.values()
    return [pair for group in groups for pair in combinations(group, 2)]


def _order(pairs: Sequence[_Pair]) -> Order:
    """Count pairs that repetitions order. One wrong pair of all is enough to miss the
    aim, so the level is that of all together.
    """
    ordered = agreed = 0
    for first, second in pairs:
        sign = measured_order(_tpots(first), _tpots(second), level=LEVEL / len(pairs))
        if sign:
            predicted_s = first["predicted"]["tpot_s"] - second["predicted"]["tpot_s"]
            ordered += 1
            agreed += int(np.sign(predicted_s) == sign)
    return Order(ordered, agreed)


def _tpots(cell: dict[str, Any]) -> list[float]:
    return [run["tpot_s"] for run in cell["measured"]]


_INTRODUCTION = (
    "What [the protocol](protocol.md) states was measured by this command, which also"
    " wrote this page:"
)
_SITTING_HEADS = (
    "sitting",
    "began",
    "seconds",
    "calibration",
    "identical runs differed by",
    "drift",
    "load before",
    "verdict",
)
_CELL_HEADS = (
    "sitting",
    "cell",
    "measured",
    "95 %",
    "predicted",
    "error",
    "beyond the interval",
    "lost",
    "counts",
)
_LEGEND = (
    "Times are those of an output token. *beyond the interval*: what of the error the"
    " measurement's own interval does not cover. *lost*: share of the time that other"
    " programs took."
)
_MET = {True: "**met**", False: "**not met**", None: "nothing counts"}


def protocol_page(
    plan: Plan, sittings: Sequence[dict[str, Any]], verdict: Verdict, command: str
) -> str:
    """Lay out a result: aims, sittings, every cell.

    Args:
        plan: what was stated before.
        sittings: what was measured.
        verdict: on it.
        command: that measured it.
    """
    sitting_rows = [
        _sitting_row(number, sitting) for number, sitting in enumerate(sittings, 1)
    ]
    lines = [
        "# Protocol: result",
        "",
        _INTRODUCTION,
        "",
        f"    {command}",
        "",
        *markdown_table(("aim", "stated", "result", ""), aim_rows(plan, verdict)),
        "",
        *markdown_table(_SITTING_HEADS, sitting_rows),
        "",
        *markdown_table(_CELL_HEADS, [_cell_row(cell) for cell in verdict.cells]),
        "",
        _LEGEND,
    ]
    return "\n".join(lines) + "\n"


def aim_rows(plan: Plan, verdict: Verdict) -> list[list[str]]:
    """Aim, what was stated, what came out, and whether it is met."""
    counted = [cell for cell in verdict.cells if not cell.excluded]
    errors = sorted(abs(cell.error) for cell in counted)
    raw = ""
    if errors:
        middle = errors[len(errors) // 2]
        raw = f" (whole error: {_percent(middle)}, {_percent(errors[-1])})"
    tau = verdict.order.tau
    return [
        [
            "error, median of cells",
            f"≤ {_percent(plan.median)}",
            _percent(verdict.median),
            _MET[verdict.met["median"]],
        ],
        [
            "error, worst cell",
            f"≤ {_percent(plan.worst)}",
            _percent(verdict.worst) + raw,
            _MET[verdict.met["worst"]],
        ],
        [
            "order of policies, tau",
            "1",
            "none" if tau is None else f"{tau:.2f} ({verdict.order.pairs} pairs)",
            _MET[verdict.met["order"]],
        ],
        [
            "calibrations that were trusted",
            str(plan.sittings),
            str(len({cell.sitting for cell in verdict.cells})),
            _MET[verdict.met["sittings"]],
        ],
        [
            "cells that count",
            "",
            f"{len(counted)} of {len(verdict.cells)}",
            "",
        ],
    ]


def _sitting_row(number: int, sitting: dict[str, Any]) -> list[str]:
    fit = sitting.get("fit", {})
    refused = sitting["refused"]
    return [
        str(number),
        sitting["began"],
        str(sitting["seconds"]),
        f"{sitting['calibration_s']} s" if "calibration_s" in sitting else "",
        _percent(fit.get("noise_floor", {}).get("residual_median")),
        _percent(fit.get("drift", {}).get("residual_median")),
        f"{sitting['load']:.1f}",
        f"refused: {refused}" if refused else "trusted",
    ]


def _cell_row(cell: CellVerdict) -> list[str]:
    return [
        str(cell.sitting),
        cell.cell,
        f"{1e3 * cell.measured_s:.1f} ms",
        f"{1e3 * cell.low_s:.1f} to {1e3 * cell.high_s:.1f}",
        f"{1e3 * cell.predicted_s:.1f} ms",
        f"{100 * cell.error:+.1f} %",
        _percent(cell.beyond),
        _percent(cell.lost),
        cell.excluded or "yes",
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def earlier(folder: Path, plan: Plan) -> list[dict[str, Any]]:
    """Read the sittings that a folder holds, in order.

    Raises:
        ProfileError: a file is damaged, or follows another protocol.
    """
    sittings = []
    for path in sorted(folder.glob("sitting-*.json")):
        try:
            sitting = load_json(read_text(path))
            followed = sitting["plan"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ProfileError(
                f"{path}: expected a sitting of a protocol, found {error}; remove it"
            ) from None
        if followed != _plain(plan):
            raise ProfileError(
                f"{path}: expected a sitting of this protocol, found one of another;"
                " choose an empty folder"
            )
        sittings.append(sitting)
    return sittings


def make_sitting(
    folder: Path,
    plan: Plan,
    *,
    seed: int,
    progress: Callable[[str, float], None],
) -> dict[str, Any]:
    """Calibrate, run all cells, and write what was measured.

    A calibration that is refused is a result, too: no cell is run then.

    Args:
        folder: of the sittings.
        plan: the protocol.
        seed: of the order of cells and of drawn routing.
        progress: called with what is done next and the share that is done.
    """
    number = len(list(folder.glob("sitting-*.json"))) + 1
    profile_path = folder / f"sitting-{number}.toml"
    sitting: dict[str, Any] = {
        "plan": _plain(plan),
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "git_commit": git_commit(),
        "load": os.getloadavg()[0],
        "refused": "",
    }
    begin_s = time.perf_counter()
    try:
        profile = calibrate(
            profile_path,
            shapes=plan.calibrated,
            quick=True,
            seed=seed,
            progress=lambda part, share: progress(part, 0.5 * share),
        )
    except ProfileError as error:
        sitting["refused"] = str(error).partition(" cannot be trusted: ")[2] or str(
            error
        )
    else:
        sitting["calibration_s"] = round(time.perf_counter() - begin_s)
        sitting["fit"] = {name: dict(fit) for name, fit in profile.fit.items()}
        validation = run_cells(
            plan,
            profile,
            seed=seed,
            progress=lambda part, share: progress(part, 0.5 + 0.5 * share),
        )
        sitting["validation"] = validation.to_json()
    sitting["seconds"] = round(time.perf_counter() - begin_s)
    write_text(folder / f"sitting-{number}.json", json.dumps(sitting, indent=1))
    return sitting


def run_cells(plan: Plan, profile: HardwareProfile, **options: Any) -> Validation:
    """Run and simulate all cells of a plan; options are those of `grid.validate`."""
    return validate(
        [resolve_trace(plan.trace)],
        policies=plan.policies,
        cache_ratios=plan.cache_ratios,
        batches=plan.batches,
        hw=profile,
        shapes=plan.shapes,
        steps=plan.steps,
        repetitions=plan.repetitions,
        **options,
    )


def _plain(plan: Plan) -> dict[str, Any]:
    """The plan as JSON reads it back."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    return plain

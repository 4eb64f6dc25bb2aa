"""Does the simulator hold on this PC? Measures it, calibrates it, runs a grid for real
and simulated, and judges, within a stated time.

Each stage leaves a file in one folder, so that a call that was interrupted, by whatever
means, is continued by the next: ``machine.toml`` (lanes alone), ``hw.toml``
(calibrated), ``runs.jsonl`` (finished runs of the grid), ``validation.*`` (the report
of what there is), ``verify.json`` (the verdict, when all is done). A folder that holds
a verdict is begun anew.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from math import comb
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from moesim.base.files import write_text
from moesim.base.units import percent
from moesim.evidence.validation.calibrate import calibrate
from moesim.evidence.validation.grid import validate
from moesim.evidence.validation.profile_checks import machine_differences
from moesim.evidence.validation.results import LEVEL, ordered_alike
from moesim.hwprofiles.calibration.estimates import measured
from moesim.hwprofiles.profile import load_profile
from moesim.hwprofiles.schema import ProfileError
from moesim.traces.shipped import resolve_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
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


_SETTING: Final = ("trace", "shape", "cache_ratio", "host_ratio", "batch")


@dataclass(frozen=True)
class Verdict:
    """What validations show. Times are those of an output token.

    Attributes:
        plan: what was stated before.
        cells: a row for each cell of each: ``sitting``, its number from 1; ``cell``, in
            words; ``measured_s``, ``low_s`` and ``high_s``, median over repetitions and
            its 95 % interval; ``predicted_s``, before it was measured; ``error``,
            predicted over measured, minus one; ``beyond``, by how much the prediction
            lies outside the interval, relative to the measured time; ``lost``, share of
            time that other programs took, median over repetitions; ``excluded``, why it
            does not count, empty where it does.
        pairs: of policies that repetitions order.
        agreed: how many of them the prediction orders so, too.
        hits_equal: wherever no decision depends on timing; None where all do.
        left_out: what was not run, in words.
        refused: why nothing was run, in words.
    """

    plan: Plan
    cells: pd.DataFrame
    pairs: int = 0
    agreed: int = 0
    hits_equal: bool | None = None
    left_out: str = ""
    refused: str = ""

    @property
    def counted(self) -> pd.Series:
        """``beyond`` of the cells that count."""
        return self.cells["beyond"][self.cells["excluded"] == ""]

    @property
    def tau(self) -> float | None:
        """Kendall's; None without a pair."""
        return (2 * self.agreed - self.pairs) / self.pairs if self.pairs else None

    @property
    def met(self) -> dict[str, bool | None]:
        """By aim, whether it is met; None where nothing counts."""
        median, worst = self.counted.median(), self.counted.max()
        known = len(self.counted) > 0
        return {
            "median": bool(median <= self.plan.median) if known else None,
            "worst": bool(worst <= self.plan.worst) if known else None,
            "order": self.agreed == self.pairs if self.pairs else None,
        }

    @property
    def holds(self) -> bool | None:
        """None where nothing that was measured can tell."""
        if not len(self.counted):
            return None
        # Orders that nothing shows are no evidence against the simulator.
        return False not in self.met.values() and self.hits_equal is not False

    @property
    def words(self) -> str:
        """A sentence."""
        counted, plan = self.counted, self.plan
        if self.refused:
            return f"cannot tell: {self.refused}; run it again while nothing else runs"
        if self.holds is None:
            return "cannot tell: no cell was measured well enough to count"
        order = "no two policies were told apart"
        if self.pairs:
            order = f"{self.agreed} of {self.pairs} orders of policies agree"
        answer = "the simulator holds on this PC"
        return (
            f"{answer if self.holds else 'it does not hold here'}: beyond what"
            f" repetitions differ by, predicted times are off by"
            f" {percent(counted.median())} in the median and {percent(counted.max())}"
            f" at worst ({len(counted)} cells; at most {percent(plan.median, 0)} and"
            f" {percent(plan.worst, 0)}); {order}"
        )

    def to_json(self) -> dict[str, Any]:
        """Aims and what came out; the validation has a file of its own."""
        known = len(self.counted) > 0
        return {
            "holds": self.holds,
            "words": self.words,
            "cells": len(self.cells),
            "cells_that_count": len(self.counted),
            "median": float(self.counted.median()) if known else None,
            "worst": float(self.counted.max()) if known else None,
            "pairs": self.pairs,
            "pairs_agreed": self.agreed,
            "hits_equal": self.hits_equal,
            "left_out": self.left_out,
            "met": self.met,
        }


_CELL: Final = (
    *("sitting", "cell", "measured_s", "low_s", "high_s", "predicted_s"),
    *("error", "beyond", "lost", "excluded"),
)


def judge(plan: Plan, results: Sequence[dict[str, Any]]) -> Verdict:
    """Judge what was measured.

    Args:
        plan: what was stated before.
        results: of sittings, as `Validation.to_json` returns them.
    """
    rows = []
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for number, result in enumerate(results, start=1):
        for cell in result["cells"]:
            rows.append({"sitting": number, **_judged(plan, cell)})
            setting = (number, *(cell[key] for key in _SETTING))
            groups.setdefault(setting, []).append(cell)
    # One wrong pair of all is enough to miss the aim, so the level is that of all
    # together.
    pairs = sum(comb(len(group), 2) for group in groups.values())
    alike = [
        sign
        for group in groups.values()
        for sign in ordered_alike(
            [cell["predicted"]["tpot_s"] for cell in group],
            [[run["tpot_s"] for run in cell["measured"]] for cell in group],
            level=LEVEL / max(pairs, 1),
        )
    ]
    hits = [result.get("hits_equal") for result in results]
    known_hits = [equal for equal in hits if equal is not None]
    return Verdict(
        plan,
        pd.DataFrame(rows, columns=list(_CELL)),
        pairs=len(alike),
        agreed=alike.count(1),
        hits_equal=all(known_hits) if known_hits else None,
        left_out="; ".join(
            filter(
                None, (result.get("config", {}).get("left_out") for result in results)
            )
        ),
    )


def _judged(plan: Plan, cell: dict[str, Any]) -> dict[str, Any]:
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
    return {
        "cell": (
            f"{cell['shape']}, {cell['policy']}, cache {cell['cache_ratio']:g}, batch"
            f" {cell['batch']}"
        ),
        "measured_s": measured_s,
        "low_s": low_s,
        "high_s": high_s,
        "predicted_s": predicted_s,
        "error": predicted_s / measured_s - 1.0,
        "beyond": outside_s / measured_s,
        "lost": lost,
        "excluded": excluded,
    }


def interval(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Median of repetitions with its 95 % interval: Student's t for fewer than six."""
    known = measured(np.asarray(seconds), source="repetitions", date="")
    assert known.interval is not None
    return known.value, *known.interval


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


# -- the command ----------------------------------------------------------------------

QUICK_PLAN: Final = Plan(sittings=1)
"""Cells and aims of the protocol, with one calibration; the time decides how many
cells and repetitions are made.
"""
_CALIBRATION_SHARE = 0.5
"""Share of the time for measuring and calibrating."""
MACHINE = "machine.toml"
CALIBRATED = "hw.toml"
JOURNAL = "runs.jsonl"
VERDICT = "verify.json"


def verify(
    folder: Path,
    *,
    minutes: float,
    seed: int = 0,
    save: Callable[[dict[str, Any]], object] = lambda _result: None,
    progress: Callable[[str, float], None] = lambda _part, _share: None,
) -> Verdict:
    """Measure, calibrate, validate and judge; go on where an earlier call stopped.

    Args:
        folder: of all results.
        minutes: for everything, building stores of experts included.
        seed: of drawn routing and the order of cells.
        save: writes a report of what there is so far.
        progress: called with what is done next and the share that is done.

    Raises:
        TraceError, ProfileError, StoreError, RuntimeFault: in one line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / VERDICT).exists():
        for name in (MACHINE, CALIBRATED, JOURNAL, VERDICT):
            (folder / name).unlink(missing_ok=True)
    begin_s = time.monotonic()
    share = _CALIBRATION_SHARE
    try:
        profile = calibrated(
            folder,
            QUICK_PLAN,
            seed=seed,
            minutes=share * minutes,
            progress=lambda part, done: progress(part, share * done),
        )
    except ProfileError as error:
        _, refused, reason = str(error).partition(" cannot be trusted: ")
        if not refused:
            raise
        # Its way out is that of `moesim calibrate`.
        reason = reason.partition("; calibrate again")[0]
        verdict = replace(judge(QUICK_PLAN, []), refused=reason)
    else:
        verdict = judged_cells(
            folder,
            QUICK_PLAN,
            profile,
            save,
            seed=seed,
            minutes=max(0.0, minutes - (time.monotonic() - begin_s) / 60.0),
            progress=lambda part, done: progress(part, share + (1.0 - share) * done),
        )
    write_text(folder / VERDICT, json.dumps(verdict.to_json(), indent=2) + "\n")
    return verdict


def judged_cells(
    folder: Path,
    plan: Plan,
    profile: HardwareProfile,
    save: Callable[[dict[str, Any]], object],
    **options: Any,
) -> Verdict:
    """Run all cells of a plan, behind those that an earlier call has run, and judge.

    Args:
        folder: of the journal of finished runs.
        plan: cells and aims.
        profile: predicts.
        save: writes a report of what there is so far.
        options: those of `grid.validate`.
    """
    validation = run_cells(
        plan,
        profile,
        journal=folder / JOURNAL,
        on_result=lambda so_far: save(so_far.to_json()),
        **options,
    )
    result = validation.to_json()
    verdict = judge(plan, [result])
    save(result | {"verdict": verdict.words})
    (folder / JOURNAL).unlink(missing_ok=True)
    return verdict


def calibrated(
    folder: Path,
    plan: Plan,
    *,
    progress: Callable[[str, float], None] = lambda _part, _share: None,
    **options: Any,
) -> HardwareProfile:
    """The profile of an earlier call where it is this machine's, else a new one.

    Args:
        folder: of the profiles.
        plan: whose sizes the experts have.
        progress: called with what is done next and the share that is done.
        options: those of `calibrate.calibrate`.
    """
    from moesim.runtime.measure.profile import measure  # noqa: PLC0415 - torch

    def is_of_this_machine(place: Path) -> bool:
        return place.exists() and not machine_differences(load_profile(place))

    place, machine = folder / CALIBRATED, folder / MACHINE
    if is_of_this_machine(place):
        return load_profile(place)
    if not is_of_this_machine(machine):
        progress("the machine's lanes", 0.0)
        measure(None, machine, quick=True)
    return calibrate(
        place,
        shapes=plan.calibrated,
        quick=True,
        hw=machine,
        progress=progress,
        **options,
    )

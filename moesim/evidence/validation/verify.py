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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moesim.base.files import write_text
from moesim.evidence.validation.calibrate import calibrate
from moesim.evidence.validation.profile_checks import machine_differences
from moesim.evidence.validation.protocol import Plan, judge, run_cells
from moesim.hwprofiles.profile import load_profile
from moesim.hwprofiles.schema import ProfileError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.evidence.validation.results import Validation
    from moesim.hwprofiles.profile import HardwareProfile

MINUTES: Final = 10.0
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


class Verification(NamedTuple):
    """The answer, and what it rests on.

    Attributes:
        holds: True, False, or None where nothing that was measured can tell.
        words: a sentence.
        facts: aims and what came out, in words.
        result: the validation as `Validation.to_json` returns it; None without one.
    """

    holds: bool | None
    words: str
    facts: dict[str, Any]
    result: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """Everything but the validation, which has a file of its own."""
        return {"holds": self.holds, "words": self.words, **self.facts}


def verify(
    folder: Path,
    *,
    plan: Plan = QUICK_PLAN,
    minutes: float = MINUTES,
    seed: int = 0,
    save: Callable[[dict[str, Any]], object] = lambda _result: None,
    progress: Callable[[str, float], None] = lambda _part, _share: None,
) -> Verification:
    """Measure, calibrate, validate and judge; go on where an earlier call stopped.

    Args:
        folder: of all results.
        plan: cells and aims; its sittings are not repeated.
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

    def left_minutes() -> float:
        return max(0.0, minutes - (time.monotonic() - begin_s) / 60.0)

    try:
        profile = _calibrated(
            folder,
            plan,
            seed=seed,
            minutes=_CALIBRATION_SHARE * minutes,
            progress=lambda part, share: progress(part, _CALIBRATION_SHARE * share),
        )
    except ProfileError as error:
        _, refused, reason = str(error).partition(" cannot be trusted: ")
        if not refused:
            raise
        # Its way out is that of `moesim calibrate`.
        reason = reason.partition("; calibrate again")[0]
        words = f"cannot tell: {reason}; run it again while nothing else runs"
        return _finished(folder, Verification(None, words, {}, None))

    def report(validation: Validation) -> None:
        save(validation.to_json())

    validation = run_cells(
        plan,
        profile,
        seed=seed,
        minutes=left_minutes(),
        journal=folder / JOURNAL,
        on_result=report,
        progress=lambda part, share: progress(
            part, _CALIBRATION_SHARE + (1.0 - _CALIBRATION_SHARE) * share
        ),
    )
    result = validation.to_json()
    verification = verdict_of(plan, result)
    save(result | {"verdict": verification.words})
    (folder / JOURNAL).unlink(missing_ok=True)
    return _finished(folder, verification)


def _calibrated(
    folder: Path,
    plan: Plan,
    *,
    seed: int,
    minutes: float,
    progress: Callable[[str, float], None],
) -> HardwareProfile:
    """The profile of an earlier call where it is this machine's, else a new one."""
    from moesim.runtime.measure.profile import measure  # noqa: PLC0415 - torch

    calibrated = folder / CALIBRATED
    if calibrated.exists():
        profile = load_profile(calibrated)
        if not machine_differences(profile):
            return profile
    machine = folder / MACHINE
    if not machine.exists() or machine_differences(load_profile(machine)):
        progress("the machine's lanes", 0.0)
        measure(None, machine, quick=True)
    return calibrate(
        calibrated,
        shapes=plan.calibrated,
        quick=True,
        hw=machine,
        seed=seed,
        minutes=minutes,
        progress=progress,
    )


def verdict_of(plan: Plan, result: dict[str, Any]) -> Verification:
    """Judge a validation by the aims of a plan.

    Args:
        plan: what was stated before.
        result: as `Validation.to_json` returns it.
    """
    verdict = judge(plan, [{"validation": result, "refused": ""}])
    counted = [cell for cell in verdict.cells if not cell.excluded]
    facts = {
        "cells": len(verdict.cells),
        "cells_that_count": len(counted),
        "median": verdict.median,
        "worst": verdict.worst,
        "pairs": verdict.order.pairs,
        "pairs_agreed": verdict.order.agreed,
        "hits_equal": result["hits_equal"],
        "left_out": result["config"].get("left_out", ""),
        "met": verdict.met,
    }
    if verdict.median is None or verdict.worst is None:
        words = "cannot tell: no cell was measured well enough to count"
        return Verification(None, words, facts, result)

    order = "no two policies were told apart"
    if verdict.order.pairs:
        order = (
            f"{verdict.order.agreed} of {verdict.order.pairs} orders of policies agree"
        )
    figures = (
        f"beyond what repetitions differ by, predicted times are off by"
        f" {verdict.median:.1%} in the median and {verdict.worst:.1%} at worst"
        f" ({len(counted)} cells; at most {plan.median:.0%} and {plan.worst:.0%});"
        f" {order}"
    )
    # Orders that nothing shows are no evidence against the simulator.
    met = [verdict.met[name] is not False for name in ("median", "worst", "order")]
    holds = all(met) and result["hits_equal"] is not False
    answer = "the simulator holds on this PC" if holds else "it does not hold here"
    return Verification(holds, f"{answer}: {figures}", facts, result)


def _finished(folder: Path, verification: Verification) -> Verification:
    text = json.dumps(verification.to_json(), indent=2) + "\n"
    write_text(folder / VERDICT, text)
    return verification

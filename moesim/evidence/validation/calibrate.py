"""Calibrates this machine: a designed set of short runs through the executor, then a
fit.

Each lane alone, each pair, all together; two sizes of experts; one token and many; with
and without the SSD; every assignment policy's planning. Routing is drawn, so that no
trace which a prediction is later compared with takes part; this module and
`hwprofiles/calibration/fit_runs.py` know of no validation
(`tests/evidence/test_separation.py`
holds that).
"""

from __future__ import annotations

import datetime as dt
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moesim.base.files import ScratchFolder
from moesim.evidence.validation.paired_runs import (
    ROUTED,
    Trial,
    TrialRunner,
    designs,
    simulate,
    step_lengths,
)
from moesim.evidence.validation.profile_checks import (
    DISTURBED,
    MOST_LOST,
    STOLEN,
    doubts_of,
    save_trusted,
)
from moesim.hwprofiles.calibration.estimates import FitReport, undisturbed_medians
from moesim.hwprofiles.calibration.fit_runs import calibrate as fit
from moesim.hwprofiles.calibration.fit_runs import profile_entries
from moesim.hwprofiles.calibration.observations import DesignedRun
from moesim.hwprofiles.profile import PREDICTIONS, HardwareProfile
from moesim.policies.systems import compose
from moesim.runs.machine import experts_dtype, machine_profile
from moesim.traces.timeline.metrics import summarise
from moesim.traces.timeline.operations import lost_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Timeline

SHAPES = ("olmoe-1b-7b/2", "olmoe-1b-7b/4")
"""Whose sizes the designed runs' experts have: two, since only different bytes separate
overhead from bandwidth.
"""

_PASSES = 5
_QUICK_PASSES = 3
"""How often all designed runs are run."""


MadeRun = tuple["ModelShape", "Trial", "Timeline"]
"""A designed run that was really made."""


def learn(
    runs: Sequence[MadeRun],
    base: HardwareProfile,
    *,
    date: str,
    name: str,
    seed: int = 0,
    stolen: Sequence[float] | None = None,
) -> HardwareProfile:
    """Put what finished runs show into a profile of the machine they ran on.

    Args:
        runs: shape, trial and timeline of each.
        base: the profile; what the runs do not show is kept from it.
        date: day of the measurement, ISO 8601.
        name: of the new profile.
        seed: of the resampling behind intervals.
        stolen: share of the cores' time that a hypervisor gave to others, by run; NaN
            where it is not counted.
    """
    chosen_steps, lost = _chosen_steps(runs, stolen or [0.0] * len(runs))
    designed = [
        DesignedRun(
            timeline,
            shape,
            # Profiles know policies by name, whatever their parameters.
            assignment=compose(trial.policy).assignment.partition(":")[0],
            context_tokens=[step.context_tokens for step in trial.steps],
            workers=base.workers,
            kept=kept,
        )
        for (shape, trial, timeline), kept in zip(runs, chosen_steps, strict=True)
    ]
    calibration = fit(designed, date=date, seed=seed)

    # Distributions of operations in isolation are not those of runs, and their farthest
    # outliers would be drawn.
    base_curves = {
        path: replace(curve, quantiles=()) for path, curve in base.curves.items()
    }
    return replace(
        base,
        name=name,
        kind="measured",
        date=date,
        numbers=profile_entries(calibration.numbers, base.numbers),
        curves={**base_curves, **calibration.curves},
        fit={**base.fit, **calibration.fit, DISTURBED: disturbance_report(lost)},
    )


def disturbance_report(lost: np.ndarray) -> dict[str, float]:
    """Report what was lost to others.

    Args:
        lost: share of each step's or run's time, float64 [N].
    """
    disturbed = int((lost > MOST_LOST).sum())
    return FitReport.of(lost, len(lost))._replace(held_out=disturbed).as_table()


def _repetitions(runs: Sequence[MadeRun]) -> list[list[int]]:
    """Numbers of the runs of each trial.

    By identity: two designs may be equal trials, and are repeated each for itself.
    """
    numbers: dict[tuple[str, int], list[int]] = {}
    for number, (shape, trial, _) in enumerate(runs):
        numbers.setdefault((shape.name, id(trial)), []).append(number)
    return list(numbers.values())


def _chosen_steps(
    runs: Sequence[MadeRun], stolen: Sequence[float]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Choose, for every step of a trial, the repetition that counts.

    Returns:
        Bool [steps] by run, and the share of time that each chosen step lost to others,
        float64 [all steps].
    """
    chosen: list[np.ndarray] = [np.empty(0)] * len(runs)
    lost_by_step = []
    for numbers in _repetitions(runs):
        timelines = [runs[number][2] for number in numbers]
        seconds = np.array([step_lengths(timeline) for timeline in timelines])
        lost = np.array(
            [
                lost_shares(timeline.operations, lengths)
                for timeline, lengths in zip(timelines, seconds, strict=True)
            ]
        )
        # No thread sees what is stolen; it is known of the whole run only.
        lost += np.nan_to_num(np.asarray(stolen)[numbers])[:, None]
        best = undisturbed_medians(seconds, lost)
        lost_by_step.append(lost[best, np.arange(len(best))])
        for repetition, number in enumerate(numbers):
            chosen[number] = best == repetition
    return chosen, np.concatenate(lost_by_step)


def calibrate(
    out: str | Path,
    *,
    shapes: Sequence[str] = SHAPES,
    quick: bool = False,
    hw: str | Path | HardwareProfile | None = None,
    stores: Path | None = None,
    seed: int = 0,
    force: bool = False,
    minutes: float | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> HardwareProfile:
    """Calibrate this machine and write its profile, if it can be trusted.

    Args:
        out: the TOML file to write.
        shapes: whose sizes the experts have, largest first; see
            `moesim.traces.models.model_shape`.
        quick: shorter runs.
        hw: profile of this machine to start from; measured now, in some ten seconds,
            when None.
        stores: folder for the experts' stores; a temporary one when None.
        seed: of the drawn routing.
        force: write a profile that cannot be trusted all the same.
        minutes: at most so long, stores included; fewer passes are made where the
            usual number does not fit, at least one.
        progress: called with what is done next and the share that is done.

    Raises:
        ProfileError: the profile cannot be trusted.
        TraceError, StoreError, RuntimeFault: in one line.
    """
    from moesim.runtime.measure.profile import (  # noqa: PLC0415 - torch
        StolenTime,
        measure,
    )

    began_s = time.monotonic()
    report_progress = progress or (lambda _purpose, _share: None)
    target = Path(out)
    load = os.getloadavg()[0]
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    # Stores are deleted last: runners read from them until they are closed.
    with ScratchFolder(stores) as folder, ExitStack() as runners:
        report_progress("the machine's lanes", 0.0)
        if hw is None:
            hw = measure(None, folder / "base.toml", quick=True)
        base = machine_profile(hw, measure_again=True)
        dtype = experts_dtype(base)

        # All runners stay open, so that passes over both shapes can take turns.
        planned = []
        for number, spec in enumerate(shapes):
            shape, store = shape_of(spec, dtype), folder / str(number)
            runner = TrialRunner(shape, base, dtype=dtype, store=store)
            runners.enter_context(runner)
            of_shape = designs(shape, quick=quick, seed=seed)
            # The first run meets memory that was never written; it does not count.
            runner.run(of_shape[-1].trial, base, seed=seed)
            planned += [(runner, design) for design in of_shape]

        others = StolenTime()
        runs: list[MadeRun] = []
        stolen: list[float] = []
        passes = _QUICK_PASSES if quick else _PASSES
        for number in range(passes):
            pass_began_s = time.monotonic()
            # Forth and back: what drifts meanwhile hits all alike.
            for runner, design in planned[::-1] if number % 2 else planned:
                share = len(runs) / (passes * len(planned))
                report_progress(f"{runner.shape.name}: {design.purpose}", share)
                timeline = runner.run(design.trial, base, seed=seed)
                stolen.append(others.share())
                runs.append((runner.shape, design.trial, timeline))
            now_s = time.monotonic()
            if minutes is not None and (
                now_s - began_s + now_s - pass_began_s > 60.0 * minutes
            ):
                break

    made = len(runs) // len(planned)
    profile = learn(runs, base, date=date, name=target.stem, seed=seed, stolen=stolen)
    tpot_s = np.array([_tpot_s(timeline) for _, _, timeline in runs])
    tpot_s = tpot_s.reshape(made, -1)
    # Every other pass went backwards.
    tpot_s[1::2] = tpot_s[1::2, ::-1]
    known = np.array(stolen)[np.isfinite(stolen)]
    profile = replace(
        profile,
        description=(
            f"{base.description.partition(';')[0]}; calibrated by {len(planned)}"
            f" designed runs, {made} times each, with {', '.join(shapes)}"
            f" ({dtype}); load average {load:.1f} when it began"
        ),
        fit={
            **profile.fit,
            **_stability(tpot_s),
            **({STOLEN: disturbance_report(known)} if len(known) else {}),
            PREDICTIONS: prediction_errors(runs, profile),
        },
        where=target.name,
    )
    save_trusted(profile, target, doubts_of(profile), "calibrate again", force=force)
    report_progress("done", 1.0)
    return profile


def prediction_errors(
    runs: Sequence[MadeRun], profile: HardwareProfile
) -> dict[str, float]:
    """Report by how much predictions of runs with a profile miss the runs.

    Every design is predicted once, and compared with the median of its repetitions.
    """
    errors = []
    for numbers in _repetitions(runs):
        shape, trial, _ = runs[numbers[0]]
        measured_s = np.median([_tpot_s(runs[number][2]) for number in numbers])
        predicted_s = _tpot_s(simulate(trial, shape, profile, noise_seed=0))
        errors.append(abs(predicted_s / float(measured_s) - 1.0))
    return FitReport.of(errors, len(runs)).as_table()


def shape_of(spec: str, dtype: str = "float32") -> ModelShape:
    """The designed runs' model with experts of another's sizes."""
    from moesim.runtime.executor.trace_driven import shape_for  # noqa: PLC0415 - torch

    return shape_for(ROUTED, spec, dtype)


def _tpot_s(timeline: Timeline) -> float:
    return float(summarise(timeline)["tpot_s"])


def _stability(tpot_s: np.ndarray) -> dict[str, dict[str, float]]:
    """Noise floor and drift of identical runs: by how much any two differ, and all last
    ones from all first ones.

    Args:
        tpot_s: seconds per output token, float64 [repetitions, runs]; a single
            repetition says nothing of either.
    """
    count = len(tpot_s)
    if count < 2:
        return {}
    relative = [
        tpot_s[first] / tpot_s[second] - 1.0
        for first, second in combinations(range(count), 2)
    ]
    # The median over runs: a machine's drift hits all of them, a disturbance one.
    moved = abs(float(np.median(tpot_s[-1] / tpot_s[0])) - 1.0)
    return {
        "noise_floor": FitReport.of(np.abs(relative).ravel(), tpot_s.size).as_table(),
        "drift": FitReport(tpot_s.size, tpot_s.shape[1], moved, moved).as_table(),
    }

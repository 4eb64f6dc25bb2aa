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
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.files import ScratchFolder
from moesim.evidence.validation.drift import ReferenceRuns
from moesim.evidence.validation.paired_runs import (
    ROUTED,
    Design,
    Trial,
    TrialRunner,
    designs,
    simulate,
    step_lengths,
)
from moesim.evidence.validation.profile_checks import (
    DISTURBED,
    MOST_LOST,
    PACE,
    PRESSURE,
    STOLEN,
    doubts_of,
    save_trusted,
    wide_constants,
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

    from moesim.runtime.measure.profile import SystemShares
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Timeline

SHAPES = ("olmoe-1b-7b/2", "olmoe-1b-7b/4")
"""Whose sizes the designed runs' experts have: two, since only different bytes separate
overhead from bandwidth.
"""

NARROW = 0.02
"""Change of a prediction within a constant's interval that needs no further runs."""
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
    pace: Sequence[float] | None = None,
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
        pace: factor by which the machine took longer than usual, by run.
    """
    paces = [1.0] * len(runs) if pace is None else pace
    chosen_steps, lost = _chosen_steps(runs, stolen or [0.0] * len(runs), paces)
    designed = [
        DesignedRun(
            timeline,
            shape,
            # Profiles know policies by name, whatever their parameters.
            assignment=compose(trial.policy).assignment.partition(":")[0],
            context_tokens=[step.context_tokens for step in trial.steps],
            workers=base.workers,
            kept=kept,
            pace=slower,
        )
        for (shape, trial, timeline), kept, slower in zip(
            runs, chosen_steps, paces, strict=True
        )
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


def _system_reports(shares: Sequence[SystemShares]) -> dict[str, dict[str, float]]:
    """Report what the kernel counted of the whole machine, where it did."""
    counted = {
        STOLEN: np.array([share.stolen for share in shares]),
        PRESSURE: np.array([share.pressure for share in shares]),
    }
    return {
        name: disturbance_report(known[np.isfinite(known)])
        for name, known in counted.items()
        if np.isfinite(known).any()
    }


def _repetitions(runs: Sequence[MadeRun]) -> list[list[int]]:
    """Numbers of the runs of each trial.

    By identity: two designs may be equal trials, and are repeated each for itself.
    """
    numbers: dict[tuple[str, int], list[int]] = {}
    for number, (shape, trial, _) in enumerate(runs):
        numbers.setdefault((shape.name, id(trial)), []).append(number)
    return list(numbers.values())


def _chosen_steps(
    runs: Sequence[MadeRun],
    stolen: Sequence[float],
    paces: Sequence[float],
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
        # By length at the same pace, or those of one time would be chosen throughout.
        pace = np.asarray(paces)[numbers]
        best = undisturbed_medians(seconds / pace[:, None], lost)
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
        minutes: at most so long, stores included, until no constant moves predictions
            by more than `NARROW`; None makes the usual number of passes, at least one.
        progress: called with what is done next and the share that is done.

    Raises:
        ProfileError: the profile cannot be trusted.
        TraceError, StoreError, RuntimeFault: in one line.
    """
    from moesim.runtime.measure.profile import measure  # noqa: PLC0415 - torch

    begin_s = time.monotonic()
    report_progress = progress or (lambda _purpose, _share: None)
    target = Path(out)
    load = os.getloadavg()[0]
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    least_passes = _QUICK_PASSES if quick else _PASSES
    # Stores are deleted last: runners read from them until they are closed.
    with ScratchFolder(stores) as folder, ExitStack() as runners:
        report_progress("the machine's lanes", 0.0)
        if hw is None:
            hw = measure(None, folder / "base.toml", quick=True)
        base = machine_profile(hw, measure_again=True)
        dtype = experts_dtype(base)

        # All runners stay open, so that passes over both shapes can take turns.
        planned: list[tuple[TrialRunner, Design]] = []
        for number, spec in enumerate(shapes):
            runner = TrialRunner(
                shape_of(spec, dtype),
                base,
                dtype=dtype,
                store=folder / str(number),
            )
            runners.enter_context(runner)
            of_shape = designs(runner.shape, quick=quick, seed=seed)
            # The first run meets memory that was never written; it does not count.
            runner.run(of_shape[-1].trial, base, seed=seed)
            planned += [(runner, design) for design in of_shape]

        reference = ReferenceRuns(base, dtype, folder, runners)
        made = _Passes(planned, base, reference, seed, date)
        while True:
            left_s = 60.0 * (minutes or 0.0) - (time.monotonic() - begin_s)
            limited = minutes is not None
            if is_enough(
                made.passes,
                least_passes,
                left_s,
                made.pass_s,
                made.widest,
                limited=limited,
            ):
                break
            made.make(least_passes, report_progress)

    profile = replace(
        made.profile(target),
        description=(
            f"{base.description.partition(';')[0]}; calibrated by {len(planned)}"
            f" designed runs, {made.passes} times each, with {', '.join(shapes)}"
            f" ({dtype}); load average {load:.1f} when it began"
        ),
    )
    save_trusted(profile, target, doubts_of(profile), "calibrate again", force=force)
    report_progress("done", 1.0)
    return profile


class _Passes:
    """Passes over all designed runs, with reference runs in between.

    Args:
        planned: runs, with what makes them.
        base: profile of this machine.
        reference: tells how fast the machine is meanwhile.
        seed: of drawn routing.
        date: of today.

    Attributes:
        runs: that were made.
        passes: how many are whole.
        pass_s: seconds of the last one.
    """

    def __init__(
        self,
        planned: Sequence[tuple[TrialRunner, Design]],
        base: HardwareProfile,
        reference: ReferenceRuns,
        seed: int,
        date: str,
    ) -> None:
        from moesim.runtime.measure.profile import SystemEvidence  # noqa: PLC0415

        self._planned = planned
        self._base = base
        self._seed = seed
        self._date = date
        self._evidence = SystemEvidence()
        self._reference = reference
        self.runs: list[MadeRun] = []
        self._system: list[SystemShares] = []
        self.passes = 0
        self.pass_s = 0.0

    def make(self, least: int, report_progress: Callable[[str, float], None]) -> None:
        """Make one more pass, of at least so many."""
        begin_s = time.monotonic()
        # Forth and back: what drifts meanwhile hits all alike.
        order = self._planned[::-1] if self.passes % 2 else self._planned
        total = max(self.passes + 1, least) * len(self._planned)
        for runner, design in order:
            shape = runner.shape
            share = len(self.runs) / total
            report_progress(f"{shape.name}: {design.purpose}", share)
            self._reference.run_if_due()
            self._evidence.shares()
            timeline = runner.run(design.trial, self._base, seed=self._seed)
            self._system.append(self._evidence.shares())
            self.runs.append((shape, design.trial, timeline))
        self.passes += 1
        self.pass_s = time.monotonic() - begin_s

    def widest(self) -> float:
        """Largest effect of a constant that is still wide."""
        learned = self.learn("so-far")
        wide = wide_constants(learned, self._planned[0][0].shape)
        return max((constant.effect for constant in wide), default=0.0)

    def learn(self, name: str, **known: Any) -> HardwareProfile:
        """Put what the runs show into a profile; `known` as in `learn`."""
        return learn(
            self.runs, self._base, date=self._date, name=name, seed=self._seed, **known
        )

    def profile(self, target: Path) -> HardwareProfile:
        """The profile of all runs, for a file, with how well it predicts them."""
        # No fit may learn costs from the reference runs, only when the machine was
        # slower.
        pace = self._reference.pace()
        stolen = [system.stolen for system in self._system]
        profile = self.learn(target.stem, stolen=stolen, pace=pace.tolist())
        tpot_s = np.array([_tpot_s(timeline) for _, _, timeline in self.runs])
        tpot_s = tpot_s.reshape(self.passes, -1)
        # Every other pass went backwards.
        tpot_s[1::2] = tpot_s[1::2, ::-1]
        profile = replace(
            profile,
            numbers={**profile.numbers, **self._reference.quantities(self._date)},
            where=target.name,
        )
        fit = {
            **profile.fit,
            **_stability(tpot_s),
            **_system_reports(self._system),
            PACE: disturbance_report(np.abs(pace - 1.0)),
            PREDICTIONS: prediction_errors(self.runs, profile),
        }
        return replace(profile, fit=fit)


def is_enough(
    made: int,
    least: int,
    left_s: float,
    pass_s: float,
    widest: Callable[[], float],
    *,
    limited: bool = False,
) -> bool:
    """Tell whether designed runs were repeated often enough.

    Args:
        made: repetitions so far.
        least: that are made in any case.
        left_s: seconds that are left.
        pass_s: seconds of one more repetition.
        widest: largest change of a prediction by a constant that is still wide; asked
            only where it decides, since it takes a fit.
        limited: whether the seconds are a limit; fewer repetitions are made then.
    """
    # One pass in any case: without it there is nothing to learn from.
    if limited and made and left_s < pass_s:
        return True
    if made < least:
        return False
    return left_s < pass_s or left_s <= 0.0 or widest() <= NARROW


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

"""Learns a profile from finished real runs, whatever they were made for.

A profile that was measured lane by lane is calibrated by the runs; one that was
calibrated is improved by them. The runs are predicted before and after, and a profile
that predicts them worse is not written.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.hwprofiles.calibration.estimates import FitReport
from moesim.hwprofiles.errors import ProfileError
from moesim.hwprofiles.prediction_error import PREDICTIONS
from moesim.hwprofiles.profile import load_profile, save_profile
from moesim.traces.timeline.metrics import summarise
from moesim.validation.calibrate import disturbance_report, learn
from moesim.validation.finished_runs import load_run
from moesim.validation.learning.factors import factors_of, lost_of_steps, simulated
from moesim.validation.learning.refine import refined
from moesim.validation.paired_runs import Trial
from moesim.validation.profile_checks import DISTURBED, doubts_of, is_calibrated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Timeline
    from moesim.validation.finished_runs import FinishedRun

MOST_WORSE = 0.01
"""By how much predictions of the runs may become worse before nothing is learned."""
_MACHINE = ("cpu", "accelerator")
"""Entries of a profile's versions in which runs of one machine agree."""


class LearnedRun(NamedTuple):
    """How one run was predicted: relative errors of its time for each output token,
    or of its whole time where it has none.
    """

    name: str
    before: float
    after: float


class Learned(NamedTuple):
    """A profile that was learned, the runs, and why it cannot be trusted."""

    profile: HardwareProfile
    runs: list[LearnedRun]
    doubts: list[str]

    def lines(self) -> list[str]:
        """What became of each run's prediction, as text."""
        width = max(len(run.name) for run in self.runs)
        lines = [
            f"  {run.name:<{width}}  predicted {100 * run.before:+.1f} % before,"
            f" {100 * run.after:+.1f} % now"
            for run in self.runs
        ]
        return lines + [f"  doubtful: {doubt}" for doubt in self.doubts]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "name": self.profile.name,
            "digest": self.profile.digest,
            "fit": {key: dict(report) for key, report in self.profile.fit.items()},
            "runs": [run._asdict() for run in self.runs],
            "doubts": self.doubts,
        }


def learn_from(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    hw: str | Path | HardwareProfile | None = None,
    force: bool = False,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> Learned:
    """Learn from finished real runs, and write the profile if it can be trusted.

    Args:
        folders: of `moesim run --out`.
        out: the TOML file to write.
        hw: the profile to start from; None takes `out` where it is there, else the
            profile of the first run.
        force: write a profile that cannot be trusted all the same.
        seed: of the resampling behind intervals.
        progress: called with what is done next and the share that is done.

    Raises:
        ProfileError: a run of another machine, or a profile that cannot be trusted.
        TraceError, ConfigError, PolicyError, StoreError: a folder is no real run's.
    """
    target = Path(out)
    report_progress = progress or (lambda _purpose, _share: None)
    runs = []
    for number, folder in enumerate(folders):
        report_progress(f"reading {folder}", 0.5 * number / len(folders))
        runs.append(load_run(folder))
    if hw is None and target.is_file():
        hw = target
    base = runs[0].setup.profile
    if hw is not None:
        base = load_profile(hw) if isinstance(hw, str | Path) else hw

    report_progress("comparing with predictions", 0.5)
    learned = learn_runs(runs, base, name=target.stem, seed=seed)
    if learned.doubts and not force:
        raise ProfileError(
            f"{target}: not written, as its predictions cannot be trusted:"
            f" {'; '.join(learned.doubts)}; make other runs while nothing else runs, or"
            " write it all the same with --force"
        )
    save_profile(learned.profile, target)
    report_progress("done", 1.0)
    return learned


def learn_runs(
    runs: Sequence[FinishedRun], base: HardwareProfile, *, name: str, seed: int = 0
) -> Learned:
    """Learn from runs of a profile's machine; nothing is written.

    Args:
        runs: at least one.
        base: the profile to start from.
        name: of the new profile.
        seed: of the resampling behind intervals.

    Raises:
        ProfileError: a run of another machine, or with CUDA.
    """
    for run in runs:
        _require_same_machine(run, base)
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    if is_calibrated(base):
        profile = refined(base, factors_of(runs, base), date)
    else:
        trials = [_as_trial(run) for run in runs]
        profile = learn(trials, base, date=date, name=name, seed=seed)

    before = [_error(run, base) for run in runs]
    after = [_error(run, profile) for run in runs]
    lost = np.concatenate([lost_of_steps(run) for run in runs])
    fit = {
        **profile.fit,
        DISTURBED: disturbance_report(lost),
        PREDICTIONS: _predictions(base, after),
    }
    profile = replace(
        profile,
        name=name,
        kind="measured",
        description=_description(base, len(runs)),
        fit=fit,
        where=f"{name}.toml",
    )
    doubts = doubts_of(profile)
    median_before = float(np.median(np.abs(before)))
    median_after = float(np.median(np.abs(after)))
    if median_after > median_before + MOST_WORSE:
        doubts.append(
            f"it would predict these runs worse than before ({100 * median_after:.0f} %"
            f" instead of {100 * median_before:.0f} %)"
        )
    rows = [
        LearnedRun(run.name, run_before, run_after)
        for run, run_before, run_after in zip(runs, before, after, strict=True)
    ]
    return Learned(profile, rows, doubts)


def _require_same_machine(run: FinishedRun, base: HardwareProfile) -> None:
    profile = run.setup.profile
    facts = {
        "cores": (base.cores, profile.cores),
        "workers": (dict(base.workers), dict(profile.workers)),
        "accelerator": (base.accelerator, profile.accelerator),
        **{
            key: (base.versions.get(key), profile.versions.get(key))
            for key in _MACHINE
            if key in base.versions and key in profile.versions
        },
    }
    for key, (expected, actual) in facts.items():
        if expected != actual:
            raise ProfileError(
                f"{run.name}: expected a run on the machine of profile {base.name}"
                f" ({key}: {expected}), found {actual}; start from a profile of that"
                " machine (--hw)"
            )


def _as_trial(run: FinishedRun) -> tuple[ModelShape, Trial, Timeline]:
    setup = run.setup
    system = setup.system
    policy = f"{system.assignment}+{system.cache}+{system.prefetch}"
    return setup.shape, Trial(policy, setup.config.memory, run.steps), run.timeline


def _error(run: FinishedRun, profile: HardwareProfile) -> float:
    """Predicted over measured time, minus one."""
    predicted = simulated(run, profile, noise_seed=0)
    return _seconds(predicted) / _seconds(run.timeline) - 1.0


def _seconds(timeline: Timeline) -> float:
    figures = summarise(timeline)
    return float(figures["tpot_s"] or figures["makespan_s"])


def _predictions(base: HardwareProfile, errors: Sequence[float]) -> dict[str, float]:
    """How far predictions are off: of these runs, and at worst of earlier ones too."""
    earlier = base.fit.get(PREDICTIONS, {}) if is_calibrated(base) else {}
    off = np.abs(errors)
    report = FitReport(
        samples=len(errors) + int(earlier.get("samples", 0)),
        held_out=len(errors),
        residual_median=float(np.median(off)),
        residual_worst=max(float(off.max()), earlier.get("residual_worst", 0.0)),
    )
    return report.as_table()


def _description(base: HardwareProfile, count: int) -> str:
    before, _, learned = base.description.partition("; learned from ")
    number = learned.partition(" ")[0]
    total = count + (int(number) if number.isdigit() else 0)
    return f"{before}; learned from {total} real runs"

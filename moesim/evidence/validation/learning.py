"""Learns a profile from finished real runs, whatever they were made for.

The same fit as of designed runs; what these runs do not show is kept from the profile
that it starts from. The runs are predicted before and after, and a profile that
predicts them worse is not written.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.base.errors import TraceError
from moesim.base.inputs import read_json
from moesim.evidence.validation.calibrate import learn
from moesim.evidence.validation.paired_runs import Trial, replayed
from moesim.evidence.validation.profile_checks import (
    doubts_of,
    save_trusted,
)
from moesim.hwprofiles.calibration.estimates import (
    FitReport,
)
from moesim.hwprofiles.profile import PREDICTIONS, load_profile
from moesim.hwprofiles.schema import ProfileError
from moesim.runs.config import MeasuredConfig
from moesim.runs.config_file import load_config
from moesim.runs.measured import PROFILE_FILE, columns_of
from moesim.runs.setup import Setup, trace_of
from moesim.runtime.executor.live_routing import FILE_NAME, load_routing
from moesim.traces.format.batch import compose
from moesim.traces.format.schema import ModelShape  # noqa: TC001 - pydantic reads it
from moesim.traces.timeline.metrics import summarise
from moesim.traces.timeline.operations import OperationTable
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.traces.format.batch import RoutedStep


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
    save_trusted(learned.profile, target, learned.doubts, "make runs", force=force)
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
    trials = [_as_trial(run) for run in runs]
    profile = learn(trials, base, date=date, name=name, seed=seed)
    before = [_error(run, base) for run in runs]
    after = [_error(run, profile) for run in runs]
    predictions = FitReport.of(np.abs(after), len(runs)).as_table()
    profile = replace(
        profile,
        description=(
            f"{base.description.partition('; learned from ')[0]}; learned from"
            f" {len(runs)} real runs"
        ),
        fit={**profile.fit, PREDICTIONS: predictions},
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


def simulated(
    run: FinishedRun, profile: HardwareProfile, *, noise_seed: int | None = None
) -> Timeline:
    """Replay a real run as a profile predicts it; decisions are made with the costs
    that the run's own policies saw.

    Args:
        run: the run.
        profile: predicts.
        noise_seed: of drawn operation times; the means when None.
    """
    return replayed(run.setup, run.steps, profile, noise_seed=noise_seed)


# -- finished real runs, read back from their folders ----------------------------------


class FinishedRun(NamedTuple):
    """A real run.

    Attributes:
        name: of its folder.
        setup: what it was run with, its own profile included.
        steps: its routing.
        timeline: its tables, those of its operations included.
    """

    name: str
    setup: Setup
    steps: list[RoutedStep]
    timeline: Timeline


@dataclass
class _RunConfig:
    model_shape: ModelShape


@dataclass
class _Figures:
    """What is read here of a run's ``run.json``."""

    config: _RunConfig


def load_run(folder: str | Path) -> FinishedRun:
    """Read a real run back.

    Args:
        folder: of `moesim run --out`.

    Raises:
        TraceError: it is no folder of a real run, or its trace is gone.
        ConfigError, ProfileError, PolicyError, StoreError: a file of it is damaged, or
            a policy is gone.
    """
    folder = Path(folder)
    operations = OperationTable.load(folder)
    timeline = Timeline.load(folder)
    timeline.operations = operations
    file = folder / "run.json"
    figures = read_json(
        file,
        _Figures,
        error=TraceError,
        expected="the figures of a real run",
        way_out="run again with --out",
    )
    shape = figures.config.model_shape
    profile = load_profile(folder / PROFILE_FILE)
    # Its own profile stands beside it, wherever the run once found it.
    config = load_config(file, MeasuredConfig).replaced(hw=profile, hw_digest=None)
    if config.model is not None:
        setup = Setup(config, shape, profile, config.system)
        routing = load_routing(folder / FILE_NAME)
        return FinishedRun(folder.name, setup, routing, timeline)

    trace = trace_of(config)
    setup = Setup.of(config, trace, profile=profile, shape=shape)
    steps = compose(
        trace,
        batch=config.batch,
        steps=config.steps,
        columns=columns_of(trace, setup.policies()),
    )
    return FinishedRun(folder.name, setup, list(steps), timeline)

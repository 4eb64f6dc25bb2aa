"""Learns a profile from finished real runs, whatever they were made for.

A profile that was measured lane by lane is calibrated by the runs; one that was
calibrated is improved by them. The runs are predicted before and after, and a profile
that predicts them worse is not written.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from moesim.base.errors import TraceError
from moesim.base.inputs import read_json
from moesim.evidence.validation.calibrate import disturbance_report, learn
from moesim.evidence.validation.paired_runs import Trial, replayed, step_lengths
from moesim.evidence.validation.profile_checks import (
    DISTURBED,
    MOST_LOST,
    doubts_of,
    is_calibrated,
    save_trusted,
)
from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import (
    FitReport,
    clipped_mean,
    interval_around,
)
from moesim.hwprofiles.calibration.fit_curves import LEAST_SAMPLES
from moesim.hwprofiles.calibration.fit_operations import SPAN_KINDS
from moesim.hwprofiles.calibration.observations import (
    DesignedRun,
    Spans,
)
from moesim.hwprofiles.lanes import COMPUTE_KINDS
from moesim.hwprofiles.profile import PREDICTIONS, load_profile
from moesim.hwprofiles.schema import Curve, ProfileError, Quantity
from moesim.runs.config import MeasuredConfig
from moesim.runs.config_file import load_config
from moesim.runs.measured import PROFILE_FILE, columns_of
from moesim.runs.setup import Setup, trace_of
from moesim.runtime.executor.live_routing import FILE_NAME, load_routing
from moesim.traces.format.batch import compose
from moesim.traces.format.schema import ModelShape  # noqa: TC001 - pydantic reads it
from moesim.traces.timeline.metrics import summarise
from moesim.traces.timeline.operations import OperationTable, lost_shares
from moesim.traces.timeline.spans import COMPUTE, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

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


Entry = TypeVar("Entry", Quantity, Curve)

MOST_REMEMBERED: Final = 4
"""Old measurements count as at most so many times the new ones: machines change, so new
ones weigh at least a fifth.
"""
_FADES: Final = log(8.0)
"""Beyond the tokens that were seen, a factor has faded at eight times as many, or an
eighth.
"""
_SOURCE: Final = "improved by real runs"


def refined(
    profile: HardwareProfile, factors: Mapping[str, Sequence[Factor]], date: str
) -> HardwareProfile:
    """Move a calibrated profile towards what runs showed.

    Args:
        profile: calibrated through the executor.
        factors: measured over predicted, by part.
        date: day of the measurement, ISO 8601.
    """
    numbers = dict(profile.numbers)
    curves = dict(profile.curves)
    for part, of_part in factors.items():
        constants = _constants(part)
        if part.startswith(PLANNING) and constants[0] not in numbers:
            # A policy that no calibration saw starts as all together do.
            default = paths.planning(paths.DEFAULT_POLICY)
            numbers |= {
                path: replace(numbers[general], samples=0)
                for path, general in zip(constants, default, strict=True)
                if general in numbers
            }
        for path in numbers.keys() & constants:
            # A rate falls where seconds grow.
            sign = -1 if path.endswith("_per_s") else 1
            numbers[path] = _improved(numbers[path], of_part, date, sign)
        # Both sizes alike: a size between them moves by as much.
        points = {paths.points(part, small=small) for small in (False, True)}
        for path in curves.keys() & points:
            curves[path] = _improved(curves[path], of_part, date)
    return replace(profile, numbers=numbers, curves=curves, date=date)


def _constants(part: str) -> tuple[str, ...]:
    """Constants of one formula, all moved alike: their ratios stay as calibrated."""
    if part.startswith(PLANNING):
        return paths.planning(part.removeprefix(PLANNING))
    control = {JOIN: paths.JOIN, FIRST_OPERATION: paths.FIRST_OPERATION}
    return () if part in _BY_TOKENS else control.get(part) or paths.link(part)


def share_of_new(new: int, old: int | None) -> float:
    """Weight of new measurements against old ones, 0.2 to 1."""
    remembered = min(old or 0, MOST_REMEMBERED * new)
    return new / (new + remembered)


def _improved(
    entry: Entry, factors: Sequence[Factor], date: str, sign: int = 1
) -> Entry:
    """Move an entry by a factor, to the power of `sign`; each point of a curve over
    tokens by the factor of its tokens: between two that were seen by both. Beyond them
    it stays as it was calibrated.
    """
    logs: list[float] = [
        sign * share_of_new(factor.samples, entry.samples) * log(factor.factor)
        for factor in factors
    ]
    by: Any = exp(logs[0])
    samples = min(factor.samples for factor in factors)
    known: dict[str, Any] = {
        "kind": "measured",
        # Once is enough, however often it is improved.
        "source": f"{entry.source.removesuffix(f'; {_SOURCE}')}; {_SOURCE}",
        "samples": (entry.samples or 0) + samples,
        "date": date,
    }
    if isinstance(entry, Curve):
        if factors[0].tokens:
            seen: list[float] = [log(factor.tokens) for factor in factors]
            seen_at = [seen[0] - _FADES, *seen, seen[-1] + _FADES]
            by = np.exp(np.interp(np.log(entry.at), seen_at, [0.0, *logs, 0.0]))
        seconds = tuple((by * np.array(entry.seconds)).tolist())
        spread = tuple((by * np.array(entry.spread)).tolist()) if entry.spread else ()
        return replace(entry, seconds=seconds, spread=spread, **known)
    value = entry.value * by
    low, high = entry.interval or (entry.value, entry.value)
    interval = interval_around(value, low * by, high * by)
    spread = (entry.spread or 0.0) * by
    return replace(entry, value=value, spread=spread, interval=interval, **known)


JOIN: Final = "join"
FIRST_OPERATION: Final = "first operation"
PLANNING: Final = "planning of "
"""Parts without a lane of their own; a policy's name follows `PLANNING`. The others
are called as lanes, or as parts of a model, are.
"""
_BY_TOKENS: Final = (*(kind.name for kind in COMPUTE_KINDS), paths.DENSE, paths.HEAD)
"""Parts whose costs are curves over tokens."""

_PER_DOUBLING: Final = 4
"""Groups of operations by tokens: so many to a doubling."""


class Factor(NamedTuple):
    """Measured over predicted seconds of about so many tokens; 0 tokens where they do
    not matter.
    """

    tokens: float
    factor: float
    samples: int


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


def lost_of_steps(run: FinishedRun) -> np.ndarray:
    """Share of each step's time that other programs took, float64 [steps]."""
    lengths_s = step_lengths(run.timeline)
    return lost_shares(run.timeline.operations, lengths_s)


def factors_of(
    runs: Sequence[FinishedRun], profile: HardwareProfile
) -> dict[str, list[Factor]]:
    """Compare runs with what a profile predicts of them.

    Args:
        runs: of the profile's machine.
        profile: predicts.

    Returns:
        By part, by ascending tokens; what was seen less often than a point of a curve
        needs is left out.
    """
    measured, predicted = [], []
    for run in runs:
        kept = lost_of_steps(run) <= MOST_LOST
        # Where every step was disturbed there is nothing better to be had.
        kept = kept if kept.any() else np.ones_like(kept)
        measured.append(_operations(run, run.timeline, kept))
        predicted.append(_operations(run, simulated(run, profile), kept))
    both = _groups(measured).join(_groups(predicted).add_suffix("_then"))
    both = both[(both["samples"] >= LEAST_SAMPLES) & (both["seconds_then"] > 0)]
    factors: dict[str, list[Factor]] = {}
    every: Iterable[Any] = both.reset_index().itertuples()
    for row in every:
        factor = Factor(row.tokens, row.seconds / row.seconds_then, row.samples)
        factors.setdefault(row.part, []).append(factor)
    return factors


def _groups(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Mean tokens and seconds of operations of one part and of about as many tokens,
    ascending.
    """
    table = pd.concat(tables)
    doublings = np.log2(np.maximum(table["tokens"], 0.5))
    table["group"] = np.round(_PER_DOUBLING * doublings)
    return table.groupby(["part", "group"]).agg(
        tokens=("tokens", "mean"),
        seconds=("seconds", lambda column: clipped_mean(column.to_numpy())),
        samples=("seconds", "size"),
    )


def _operations(run: FinishedRun, timeline: Timeline, kept: np.ndarray) -> pd.DataFrame:
    """Part, tokens and seconds of all operations of a run, or of a simulation of it."""
    policy = run.setup.system.assignment.partition(":")[0]
    spans = Spans(
        [
            DesignedRun(
                timeline,
                run.setup.shape,
                assignment=policy,
                context_tokens=[step.context_tokens for step in run.steps],
                workers=run.setup.profile.workers,
                kept=kept,
            )
        ]
    )
    gaps = spans.gaps()
    moves = {kind: spans.operations(kind, of).table for kind, of in SPAN_KINDS.items()}
    products = {
        kind: spans.operations(kind, (COMPUTE,)).table for kind in COMPUTE_KINDS
    }
    dense = spans.dense_parts()
    parts = {
        FIRST_OPERATION: gaps.first,
        JOIN: gaps.join,
        PLANNING + policy: spans.planning(),
        **{kind.name: table.assign(tokens=0.0) for kind, table in moves.items()},
        **{kind.name: table for kind, table in products.items()},
        paths.DENSE: dense[dense["layer"] >= 0],
        paths.HEAD: dense[dense["layer"] < 0].assign(tokens=dense["sequences"]),
    }
    columns = ["tokens", "seconds"]
    table = pd.concat({part: of.reindex(columns=columns) for part, of in parts.items()})
    return (
        table.fillna({"tokens": 0.0}).rename_axis(["part", "row"]).reset_index("part")
    )


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

"""Which policy is fastest: the runs of a sweep, kept whole for reports on what each of
them did.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.files import remove_leftovers
from moesim.policies.base import PolicyError
from moesim.questions.ranked import axis_value, ranked_answer
from moesim.runs.bound import bound_of
from moesim.runs.config import CHOICES, RunConfig, takes_options
from moesim.runs.setup import Setup, opened
from moesim.runs.sweeps.execution import run_tasks
from moesim.runs.sweeps.plan import planned
from moesim.runs.sweeps.ranking import candidate, competing_axes, ranking
from moesim.runs.sweeps.rows import as_frame, as_table, observed
from moesim.runs.sweeps.sweep import configs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pandas as pd

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.reporting.answers import Answer
    from moesim.runs.result import Run
    from moesim.runs.sweeps.plan import Plan, Point
    from moesim.traces.format.reader import Trace

    Machine = str | Path | HardwareProfile


@dataclass(slots=True, repr=False)
class Comparison:
    """The runs of every policy, on every machine with every memory that was asked for.

    ``table, runs = moesim.compare(...)`` takes it apart.

    Attributes:
        table: a row per policy and setting, the fastest first (see `moesim.ranking`).
        runs: by policy; by the values of the other axes and the policy, where there
            are such axes.
        frame: a row per run, as `moesim.sweep` returns it with ``details=True``.
    """

    table: pd.DataFrame
    runs: dict[Any, Run]
    frame: pd.DataFrame

    def __iter__(self) -> Iterator[Any]:
        """Table and runs."""
        return iter((self.table, self.runs))

    def answer(self) -> Answer:
        """Who is fastest, why, and what to know before believing it."""
        return ranked_answer(self.frame, self.runs, self.table)

    def __repr__(self) -> str:
        """How much was compared."""
        policies = self.table["candidate"].nunique()
        return f"<Comparison of {policies} policies, {len(self.runs)} runs>"

    def _repr_markdown_(self) -> str:
        return self.answer()._repr_markdown_()


@takes_options(RunConfig, without=["policy"])
def compare(
    trace: RunConfig | str | Path | Trace,
    policies: Sequence[str] | str,
    *,
    hw: Sequence[Machine | None] | Machine | None = None,
    out: str | Path | None = None,
    keep: bool = True,
    jobs: int | None = 1,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> Comparison:
    """Replay one trace under several policies, on one machine or several.

    Every option may be a list, as in `moesim.sweep`, which takes many runs and keeps a
    row of each; this keeps them whole. A policy may be written
    ``greedy+lru+residual``: assignment or system, then cache, then prefetch.

    Args:
        trace: a moesim trace, by path or opened; or a configuration, whose options
            those given here replace.
        policies: systems or assignment policies, in a list or separated by commas.
        hw: hardware profiles, each by name, path or itself.
        out: each run has a folder below it, named after its policy, in folders for
            other axes where there are some.
        keep: keep the timelines of all runs in memory; without it and without `out`
            they are empty.
        jobs: replays at the same time, in processes of their own where it is more than
            1; None takes as many as pay.
        progress: called with the share that is done.
        options: fields of `moesim.runs.config.RunConfig`, each a value or a list.

    Raises:
        TypeError, ConfigError, TraceError, ProfileError, PolicyError: as `replay`, and
            before anything runs; also for nothing to compare.
        ChildProcessError: processes were killed time and again.
    """
    config, open_trace = opened(RunConfig.of(trace))
    options["policy"] = policies
    if hw is not None:
        options["hw"] = hw
    plan = planned(configs_of(config, options))
    _check(plan, open_trace)
    tasks = [(point, _folder(out, plan, point)) for point in plan.points]

    results: dict[int, tuple[dict[str, Any], Run]] = {}
    try:
        run_tasks(
            partial(_carry_out, keep),
            tasks,
            results.__setitem__,
            jobs=jobs,
            rows=plan.rows,
            progress=progress,
        )
    except BaseException:
        # Processes that were killed could not clear up after themselves.
        for _, folder in tasks:
            if folder is not None:
                remove_leftovers(folder, older_s=0)
        raise
    rows, replayed = zip(*(results[n] for n in range(len(tasks))), strict=True)
    frame = as_frame(as_table(rows), axes=plan.axes, details=True)
    where = [name for name in plan.axes if name not in CHOICES]
    competing = competing_axes(plan.axes)
    runs: dict[Any, Run] = {}
    for row, run in zip(frame.to_dict("records"), replayed, strict=True):
        cell = [axis_value(name, row[name]) for name in where]
        name = candidate(row, competing)
        runs[(*cell, name) if cell else name] = run
    table = ranking(frame)
    if not where:
        for point, (name, run) in zip(plan.points, runs.items(), strict=False):
            if name in table.loc[table["fastest"], "candidate"].tolist():
                run.bound = bound_of(_config(point, point.trace))
    return Comparison(table, runs, frame)


def _config(point: Point, trace: str | Trace) -> RunConfig:
    return point.config.replaced(trace=trace, hw=point.profile)


def _carry_out(
    keep: bool,
    task: tuple[Point, Path | None],
    progress: Callable[[float], None],
) -> tuple[dict[str, Any], Run]:
    """Replay one point into a folder; its row, and the run."""
    point, folder = task
    config, _ = opened(_config(point, point.trace))
    return observed(point, config, progress, out=folder, keep=keep)


def _words(plan: Plan, point: Point) -> dict[str, str]:
    """Values of the axes at a point, as they are called."""
    values = {name: getattr(point.config, name) for name in plan.axes}
    if "hw" in values:
        values["hw"] = point.profile.name
    return {name: axis_value(name, value) for name, value in values.items()}


def _folder(out: str | Path | None, plan: Plan, point: Point) -> Path | None:
    """Of a run: named after what there is more than one of, and its policy."""
    if out is None:
        return None
    words = _words(plan, point)
    profiles = [each.profile for each in plan.points]
    if len({each.digest for each in profiles}) > len({each.name for each in profiles}):
        words["hw"] += f"_{point.profile.digest:.6}"
    words.pop("policy", None)
    return Path(out, *map(folder_name, [*words.values(), point.config.policy]))


def _check(plan: Plan, trace: Trace) -> None:
    """Refuse what cannot run before anything does: an hour later it costs an hour.

    Raises:
        TraceError, ProfileError, PolicyError: as `check`; one error for all runs.
    """
    refused: dict[str, ValueError] = {}
    for point in plan.points:
        try:
            check(_config(point, trace))
        except ValueError as error:
            refused[", ".join(_words(plan, point).values())] = error
    if not refused:
        return
    first, *_ = refused.values()
    if len(refused) == len(plan.points) and len(set(map(str, refused.values()))) == 1:
        raise first
    each = "; ".join(f"{where}: {error}" for where, error in refused.items())
    raise PolicyError(f"{len(refused)} of {len(plan.points)} cannot run: {each}")


def check(config: RunConfig) -> None:
    """Refuse what `replay` cannot carry out: columns, artefacts, memories and
    parameters are checked by setting a run up and throwing it away.

    Raises:
        TraceError, ProfileError, PolicyError: as `replay`.
    """
    # One step and no calibration: the walk is not what is checked.
    single, trace = opened(config.replaced(steps=1, warm=None))
    setup = Setup.of(single, trace)
    if config.warm is not None:
        setup.calibration = np.ones((trace.shape.layers, trace.shape.experts))
    setup.planner()


def folder_name(name: str) -> str:
    """A name for the folder of a policy's run: ``greedy+lfu:decay=0.9`` ->
    ``greedy+lfu_decay=0.9``.
    """
    # Colons and slashes of specifications are no parts of file names everywhere.
    return re.sub(r"[^\w.+=,-]+", "_", name).strip("._") or "run"

"""Everything that `moesim reproduce --all` does: runs, explanations, experiments on
routing alone, one page.
"""

from __future__ import annotations

import datetime as dt
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.reproduction.experiments import EXPERIMENTS
from moesim.reproduction.papers import dali
from moesim.reproduction.papers.explanations import (
    better_run,
    distinct,
    explain,
    gap_of,
)
from moesim.reproduction.papers.orders import directions, orders
from moesim.reproduction.papers.report import Report, report, write
from moesim.reproduction.papers.reproduce_all import (
    MOST_JOBS,
    Reproduced,
    in_order,
    reproduce_all,
)
from moesim.reproduction.published import Reproduction, published, reproduce
from moesim.runs.machine import cores
from moesim.traces.shipped import resolve_trace
from moesim.version import __version__, git_commit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.reproduction.experiments.base import Figures
    from moesim.reproduction.papers.explanations import Explanation
    from moesim.reproduction.papers.runs import RunSpec

EXPERIMENT_STEPS = 50
"""Forward passes of each trace that experiments on routing alone look at."""
# Shares of the whole work, for a progress bar only.
_RUNS_SHARE = 0.6
_GAPS_SHARE = 0.25

Progress = Callable[[float], None]


def reproduce_everything(
    out: Path,
    *,
    papers: Iterable[str] | None = None,
    machines: str = "anchored",
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compute everything and write the page into `out`.

    Args:
        out: folder for ``reproduction.html``, ``.md`` and ``.json``.
        papers: names of sources; None takes all, and experiments on routing alone with
            them.
        machines: ``anchored`` or ``datasheet``.
        jobs: processes; None takes one per core, two at most.
        progress: called with the share of the work done.

    Raises:
        TraceError, ProfileError, PolicyError: bad input.
    """
    begin_s = time.perf_counter()
    show = progress or (lambda _share: None)
    if jobs is None:
        jobs = min(MOST_JOBS, cores())
    # Traces are drawn anew every time: what lay there could be of an older version.
    with tempfile.TemporaryDirectory(prefix="moesim-papers-") as name:
        folder = Path(name)
        reproduced = reproduce_all(
            folder,
            papers=papers,
            machines=machines,
            jobs=jobs,
            progress=lambda share: show(_RUNS_SHARE * share),
        )
        explanations = _explained(
            reproduced,
            folder,
            jobs,
            lambda share: show(_RUNS_SHARE + _GAPS_SHARE * share),
        )
        experiments: list[Reproduction] = []
        if papers is None:
            experiments = _experiments(
                folder,
                jobs,
                lambda share: show(
                    _RUNS_SHARE + _GAPS_SHARE + (1 - _RUNS_SHARE - _GAPS_SHARE) * share
                ),
            )
    wall_s = time.perf_counter() - begin_s
    page = report(
        reproduced, explanations, experiments, _facts(reproduced, jobs, wall_s)
    )
    write(out, reproduced, page)
    return page


def _explained(
    reproduced: Reproduced, folder: Path, jobs: int, show: Progress
) -> list[Explanation]:
    """Explanations of all directions and orders of systems that do not hold."""
    stated = [*directions(reproduced.answered), *orders(reproduced.answered)]
    failing = [each for each in stated if each.of_systems and not each.holds]
    specs = distinct(better_run(each) for each in failing)
    # A gap belongs to the machine that the run was really done on.
    if reproduced.machines == "datasheet":
        actual = [spec.unanchored() for spec in specs]
    else:
        actual = specs
    tasks = [(spec, folder) for spec in actual]
    shares = in_order(_gap, tasks, jobs=jobs, progress=show)
    gaps = dict(zip(specs, shares, strict=True))
    return [explain(each, reproduced.outcomes, gaps) for each in failing]


def _gap(task: tuple[RunSpec, Path], _progress: Progress) -> dict[str, float] | None:
    return gap_of(*task)


def _experiments(folder: Path, jobs: int, show: Progress) -> list[Reproduction]:
    """Experiments on routing alone, on the shipped trace and on drawn ones without
    predictions.

    Drawn predictions have the published accuracies, so they would prove themselves.
    """
    traces = [resolve_trace("tiny")]
    # Not Qwen's: it has as many layers and experts as both others together.
    traces += [
        dali.WORKLOADS[model].calibration().draw(folder)
        for model in ("Mixtral", "DeepSeek")
    ]
    tasks = [(name, tuple(traces)) for name in EXPERIMENTS]
    measured = in_order(_experiment, tasks, jobs=jobs, progress=show)
    return [
        Reproduction(experiment, published(experiment), *figures, EXPERIMENT_STEPS)
        for experiment, figures in zip(EXPERIMENTS.values(), measured, strict=True)
    ]


def _experiment(
    task: tuple[str, tuple[Path, ...]], _progress: Progress
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Figures and models by trace; an experiment's functions stay in their process."""
    name, traces = task
    done = reproduce(name, traces, steps=EXPERIMENT_STEPS)
    return done.measured, done.models


def _facts(reproduced: Reproduced, jobs: int, wall_s: float) -> list[str]:
    cpu_s = sum(outcome.get("cpu_s", 0.0) for outcome in reproduced.outcomes.values())
    commit = git_commit() or "no checkout"
    today = dt.datetime.now(tz=dt.UTC).date()
    return [
        f"moesim {__version__}, commit {commit}, {today}",
        (
            f"{len(reproduced.outcomes)} runs, {cpu_s:.0f} CPU seconds without the"
            f" drawing of traces; {wall_s:.0f} s in {jobs} processes on"
            f" {os.cpu_count()} cores"
        ),
        f"machines: {reproduced.machines}",
    ]

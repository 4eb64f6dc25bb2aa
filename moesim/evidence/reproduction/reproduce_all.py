"""Everything that `moesim reproduce --all` does: draws traces, does the runs behind all
records, and the experiments on routing alone.

What is done is noted in the output folder, so that an interrupted command goes on where
it stopped.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import time
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from moesim.base.errors import TraceError
from moesim.base.host_limits import available_cores
from moesim.base.long_work import Journal
from moesim.base.version import __version__, git_commit
from moesim.evidence.reproduction.questions import (
    Answered,
    exchanged,
    questions,
    recorded,
    unanchored,
)
from moesim.evidence.reproduction.routing import (
    EXPERIMENTS,
    Reproduction,
    reproduce,
    shared_traces,
)
from moesim.evidence.reproduction.runs import learned_cache
from moesim.hwprofiles.profile import load_profile
from moesim.hwprofiles.schema import ProfileError
from moesim.policies.base import PolicyError
from moesim.runs.sweeps.execution import run_tasks
from moesim.traces.shipped import resolve_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from moesim.evidence.reproduction.questions import Question
    from moesim.evidence.reproduction.runs import Outcome, RunSpec

    Progress = Callable[[float], None]

MOST_JOBS = 2
EXPERIMENT_STEPS = 50
"""Forward passes of each trace that experiments on routing alone look at."""


@dataclass(slots=True)
class Reproduced:
    """All records, with the outcomes behind them.

    Attributes:
        answered: in the order of the sources.
        outcomes: run -> its metrics.
        failures: run -> why it could not be done.
        experiments: those on routing alone.
        recorded: headline questions, and what they give on each text of recorded
            routing, by recording; empty where there is none.
        machines: ``anchored`` or ``datasheet``.
        facts: what the figures were made with, a line each.
    """

    answered: list[Answered]
    outcomes: dict[RunSpec, Outcome]
    failures: dict[RunSpec, str]
    experiments: list[Reproduction]
    recorded: list[tuple[Answered, dict[str, list[float]]]]
    machines: str
    facts: list[str]


def reproduce_all(
    out: Path,
    *,
    papers: Iterable[str] | None = None,
    machines: str = "anchored",
    jobs: int | None = None,
    progress: Progress = lambda _share: None,
) -> Reproduced:
    """Answer every record.

    Args:
        out: folder for what is done and for drawn traces, until all is done.
        papers: names of sources; None takes all, and experiments on routing alone with
            them.
        machines: ``anchored``, or ``datasheet`` for machines of which nothing was taken
            from a paper.
        jobs: processes; None takes one per core, two at most.
        progress: called with the share of the work done.

    Raises:
        TraceError, ProfileError, PolicyError: bad input.
    """
    begin_s = time.perf_counter()
    jobs = jobs or min(MOST_JOBS, available_cores())
    asked = questions(papers)
    # Exchanges are of anchored machines.
    again = exchanged(asked if machines == "anchored" else [])
    texts = recorded(shared_traces()) if papers is None else []
    groups = [group for _, groups in texts for group in groups.values()]
    every = chain(asked, *groups, *(each.values() for each in again.values()))
    actual = {
        spec: unanchored(spec) if machines == "datasheet" else spec
        for question in every
        for spec in question.runs
    }
    done = _Done(out, jobs)
    runs = list(dict.fromkeys(actual.values()))
    workloads = {
        load
        for spec in runs
        if not done.has(spec)
        for load in (spec.workload, *[spec.calibration] * bool(spec.warm))
    }
    networks = {spec.workload for spec in runs if spec.learned and not done.has(spec)}
    experiments = list(EXPERIMENTS) if papers is None else []
    tasks: list[tuple[Any, ...]] = []

    # Networks need their traces, and are long; runs need both.
    done.draw(_draw, sorted(workloads, key=repr), lambda share: progress(0.1 * share))
    done.draw(
        _train, sorted(networks, key=repr), lambda share: progress(0.1 + 0.1 * share)
    )
    done.add(_do, runs, lambda share: progress(0.2 + 0.6 * share))
    if experiments:
        traces = _experiment_traces(done.folder)
        tasks = [(name, *traces) for name in experiments]
        done.add(_experiment, tasks, lambda share: progress(0.8 + 0.2 * share))

    results = {spec: done.of(run) for spec, run in actual.items()}
    outcomes = {
        spec: outcome for spec, (outcome, failure) in results.items() if outcome
    }
    answered = [
        Answered(
            question,
            question.figure(outcomes),
            {
                name: ours
                for name, others in again.items()
                if question.record in others
                and (ours := others[question.record].figure(outcomes)) is not None
            },
        )
        for question in asked
    ]
    reproduced = Reproduced(
        answered=answered,
        outcomes=outcomes,
        failures={spec: failure for spec, (_, failure) in results.items() if failure},
        experiments=[
            Reproduction(EXPERIMENTS[name], measured, models, EXPERIMENT_STEPS)
            for name, (measured, models) in zip(
                experiments, map(done.of, tasks), strict=True
            )
        ],
        recorded=[
            (
                Answered(question, question.figure(outcomes)),
                {name: _figures(of, outcomes) for name, of in groups_of.items()},
            )
            for question, groups_of in texts
        ],
        machines=machines,
        facts=[
            (
                f"moesim {__version__}, commit {git_commit() or 'no checkout'},"
                f" {dt.datetime.now(tz=dt.UTC).date()}"
            ),
            (
                f"{len(outcomes)} runs in {time.perf_counter() - begin_s:.0f} s, in"
                f" {jobs} processes on {os.cpu_count()} cores"
            ),
            f"machines: {machines}",
        ],
    )
    done.discard()
    return reproduced


def _figures(
    asked: Iterable[Question], outcomes: dict[RunSpec, Outcome]
) -> list[float]:
    figures = (question.figure(outcomes) for question in asked)
    return [figure for figure in figures if figure is not None]


class _Done:
    """Results by task, and drawn traces, kept in a folder; those of another commit are
    forgotten.
    """

    def __init__(self, out: Path, jobs: int) -> None:
        version = f"{__version__} {git_commit()}"
        self._journal = Journal(out / "reproduction.part.jsonl", version)
        self._results: dict[str, Any] = dict(self._journal.lines)
        self._jobs = jobs
        self.folder = out / "reproduction.part"
        if not self._results:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)

    def has(self, task: Any) -> bool:
        """Whether a task's result is there."""
        return _key(task) in self._results

    def of(self, task: Any) -> Any:
        """A task's result."""
        return self._results[_key(task)]

    def draw(
        self, work: Callable[..., Any], tasks: Iterable[Any], progress: Progress
    ) -> None:
        """Let tasks write their files."""
        inputs = [(task, self.folder) for task in sorted(tasks, key=repr)]
        run_tasks(work, inputs, lambda *_: None, jobs=self._jobs, progress=progress)

    def add(
        self, work: Callable[..., Any], tasks: Iterable[Any], progress: Progress
    ) -> None:
        """Do the tasks that are not done yet."""
        todo = [task for task in tasks if not self.has(task)]

        def collect(index: int, result: Any) -> None:
            self._results[_key(todo[index])] = result
            self._journal.add([_key(todo[index]), result])

        inputs = [(task, self.folder) for task in todo]
        run_tasks(work, inputs, collect, jobs=self._jobs, progress=progress)

    def discard(self) -> None:
        """Remove everything."""
        self._journal.close()
        shutil.rmtree(self.folder)


def _key(task: Any) -> str:
    # A machine's profile may have been edited since.
    return f"{task!r} {_machine_digest(getattr(task, 'machine', None))}"


@cache
def _machine_digest(machine: str | None) -> str:
    return "" if machine is None else load_profile(machine).digest


def _draw(task: Any, _progress: Progress) -> None:
    workload, folder = task
    workload.draw(folder)


def _train(task: Any, _progress: Progress) -> None:
    with contextlib.suppress(ImportError):
        learned_cache(*task)


def _do(task: tuple[RunSpec, Path], _progress: Progress) -> tuple[Outcome, str]:
    """The outcome of a run, or what it lacks."""
    spec, folder = task
    try:
        return spec.do(folder), ""
    except ImportError:
        return {}, "needs PyTorch: pip install 'moesim[runtime]'"
    except (TraceError, ProfileError, PolicyError) as error:
        return {}, str(error)


def _experiment_traces(folder: Path) -> tuple[Path, ...]:
    """Traces of experiments on routing alone: the shipped one and drawn ones without
    predictions.

    Drawn predictions have the published accuracies, so they would prove themselves.
    """
    drawn = {
        run.workload.model: run.workload
        for question in questions(["DALI"])
        for run in question.runs
    }
    # Not Qwen's: it has as many layers and experts as both others together.
    models = ("mixtral-8x7b", "deepseek-v2-lite")
    calibrations = [drawn[model].calibration().draw(folder) for model in models]
    return (resolve_trace("tiny"), *calibrations)


def _experiment(task: Any, _progress: Progress) -> tuple[Any, Any]:
    """Figures and models by trace; an experiment's functions stay in their process."""
    (name, *traces), _folder = task
    done = reproduce(name, traces, steps=EXPERIMENT_STEPS)
    return done.measured, done.models

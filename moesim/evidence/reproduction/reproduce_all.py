"""Everything that `moesim reproduce --all` does: draws traces, does the runs behind all
records, and the experiments on routing alone.

What is done is noted in the output folder, so that an interrupted command goes on where
it stopped.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.errors import TraceError
from moesim.base.host_limits import available_cores
from moesim.base.long_work import Every, Journal, Until
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
    from moesim.evidence.reproduction.questions import Question
    from moesim.evidence.reproduction.routing_caches import Figures
    from moesim.evidence.reproduction.runs import Outcome, RunSpec
    from moesim.evidence.reproduction.workloads import Workload

MOST_JOBS = 2
_VERSION = f"{__version__} {git_commit()}"
"""What lies there of another is done anew."""
EXPERIMENT_STEPS = 50
"""Forward passes of each trace that experiments on routing alone look at."""
# Shares of the whole work, for a progress bar only.
_RUNS_SHARE = 0.8

Progress = Callable[[float], None]


@dataclass(slots=True)
class Reproduced:
    """All records, with the outcomes behind them.

    Attributes:
        answered: in the order of the sources.
        outcomes: run -> its metrics.
        failures: run -> why it could not be done.
        left_out: runs and experiments that are still to be done.
        experiments: those on routing alone.
        recorded: headline questions, and what they give on each text of recorded
            routing, by recording; empty where there is none.
        machines: ``anchored`` or ``datasheet``.
        facts: what the figures were made with, a line each.
    """

    answered: list[Answered]
    outcomes: dict[RunSpec, Outcome]
    failures: dict[RunSpec, str] = field(default_factory=dict)
    left_out: int = 0
    experiments: list[Reproduction] = field(default_factory=list)
    recorded: list[tuple[Answered, dict[str, list[float]]]] = field(
        default_factory=list
    )
    machines: str = "anchored"
    facts: list[str] = field(default_factory=list)


def reproduce_all(
    out: Path,
    *,
    papers: Iterable[str] | None = None,
    machines: str = "anchored",
    jobs: int | None = None,
    minutes: float | None = None,
    save: Callable[[Reproduced], object] = lambda _reproduced: None,
    progress: Progress | None = None,
) -> Reproduced:
    """Answer every record.

    Args:
        out: folder for what is done and for drawn traces, until all is done.
        papers: names of sources; None takes all, and experiments on routing alone with
            them.
        machines: ``anchored``, or ``datasheet`` for machines of which nothing was taken
            from a paper.
        jobs: processes; None takes one per core, two at most.
        minutes: after which nothing more is begun; None for no limit. The next call
            goes on.
        save: called with what there is, every half minute.
        progress: called with the share of the work done.

    Raises:
        TraceError, ProfileError, PolicyError: bad input.
    """
    show = progress or (lambda _share: None)
    if jobs is None:
        jobs = min(MOST_JOBS, available_cores())
    plan = _Plan(None if papers is None else list(papers), machines, jobs)
    end_s = math.inf if minutes is None else time.time() + 60.0 * minutes
    saving = Every(lambda: save(plan.answer(done)))
    done = Done(out / "reproduction.part.jsonl", saving.if_due)
    folder = _drawn_folder(out)
    wanted = plan.runs()
    draws = _draws([spec for spec in wanted if not done.has(spec)], folder)
    drawn = _RUNS_SHARE * len(draws) / (len(draws) + len(wanted))
    run_tasks(
        Until(_draw, end_s),
        draws,
        lambda _index, _result: None,
        jobs=jobs,
        progress=lambda share: show(drawn * share),
    )
    done.add_all(
        Until(_do, end_s),
        {spec: (spec, folder) for spec in wanted},
        jobs,
        lambda share: show(drawn + (_RUNS_SHARE - drawn) * share),
    )
    if plan.experiments and end_s > time.time():
        traces = _experiment_traces(folder)
        done.add_all(
            Until(_experiment, end_s),
            {name: (name, traces) for name in plan.experiments},
            jobs,
            lambda share: show(_RUNS_SHARE + (1 - _RUNS_SHARE) * share),
        )
    reproduced = plan.answer(done)
    if not reproduced.left_out:
        done.discard()
        shutil.rmtree(folder.parent)
    return reproduced


def _drawn_folder(out: Path) -> Path:
    """Where traces are drawn, and found by the next call of the same commit."""
    parent = out / "reproduction.part"
    folder = parent / _digest(_VERSION)
    for other in set(parent.glob("*")) - {folder}:
        shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class _Plan:
    """What is asked, and which runs answer it."""

    def __init__(self, papers: list[str] | None, machines: str, jobs: int) -> None:
        self._asked = questions(papers)
        self._texts = recorded(shared_traces()) if papers is None else []
        self._machines = machines
        self._jobs = jobs
        self._begin_s = time.perf_counter()
        groups = [groups for _, groups in self._texts]
        again = [each for group in groups for each in chain(*group.values())]
        # Exchanges are of anchored machines.
        self._exchanged = exchanged(self._asked if machines == "anchored" else [])
        again += chain(*(each.values() for each in self._exchanged.values()))
        specs = dict.fromkeys(r for each in [*self._asked, *again] for r in each.runs)
        self._actual = {
            spec: unanchored(spec) if machines == "datasheet" else spec
            for spec in specs
        }
        self.experiments: dict[str, Any] = (
            dict.fromkeys(EXPERIMENTS) if papers is None else {}
        )

    def runs(self) -> list[RunSpec]:
        """Each run once."""
        return list(dict.fromkeys(self._actual.values()))

    def answer(self, done: Done) -> Reproduced:
        """Every record, with the runs that are done."""
        outcomes = {}
        failures = {}
        for spec, run in self._actual.items():
            if done.has(run):
                outcome, failure = done.of(run)
                if failure:
                    failures[spec] = failure
                else:
                    outcomes[spec] = outcome
        experiments = []
        for name in filter(done.has, self.experiments):
            measured, models = done.of(name)
            experiments.append(
                Reproduction(EXPERIMENTS[name], measured, models, EXPERIMENT_STEPS)
            )
        left_out = len(self._actual) - len(outcomes) - len(failures)
        left_out += len(self.experiments) - len(experiments)
        return Reproduced(
            [self._answered(each, outcomes) for each in self._asked],
            outcomes,
            failures,
            left_out,
            experiments,
            recorded=[
                (
                    Answered(question, question.figure(outcomes)),
                    {
                        name: [f for q in of if (f := q.figure(outcomes)) is not None]
                        for name, of in groups.items()
                    },
                )
                for question, groups in self._texts
            ],
            machines=self._machines,
            facts=self._facts(outcomes, left_out),
        )

    def _answered(
        self, question: Question, outcomes: dict[RunSpec, Outcome]
    ) -> Answered:
        figures = {
            name: again[question.record].figure(outcomes)
            for name, again in self._exchanged.items()
            if question.record in again
        }
        done = {name: ours for name, ours in figures.items() if ours is not None}
        return Answered(question, question.figure(outcomes), done)

    def _facts(self, outcomes: dict[RunSpec, Outcome], left_out: int) -> list[str]:
        cpu_s = sum(outcome.get("cpu_s", 0.0) for outcome in outcomes.values())
        today = dt.datetime.now(tz=dt.UTC).date()
        facts = [
            f"moesim {__version__}, commit {git_commit() or 'no checkout'}, {today}",
            (
                f"{len(outcomes)} runs, {cpu_s:.0f} CPU seconds without the drawing of"
                f" traces; {time.perf_counter() - self._begin_s:.0f} s in"
                f" {self._jobs} processes on {os.cpu_count()} cores"
            ),
            f"machines: {self._machines}",
        ]
        if left_out:
            facts.append(
                f"NOT ALL: {left_out} runs and experiments are still to be done; the"
                " same command goes on"
            )
        return facts


class Done:
    """Results by task, kept in a file; those of another commit are forgotten.

    Args:
        path: the file.
        collected: called after each result.
    """

    def __init__(
        self, path: Path, collected: Callable[[], object] = lambda: None
    ) -> None:
        self._journal = Journal(path, _VERSION)
        self._results: dict[str, Any] = dict(self._journal.lines)
        self._collected = collected

    def has(self, task: Any) -> bool:
        """Whether a task's result is there."""
        return _key(task) in self._results

    def of(self, task: Any) -> Any:
        """A task's result."""
        return self._results[_key(task)]

    def add_all(
        self, work: Until, tasks: dict[Any, Any], jobs: int, progress: Progress
    ) -> None:
        """Do the tasks, name -> input, that are not done yet, as far as time allows."""
        todo = [name for name in tasks if not self.has(name)]

        def collect(index: int, result: Any) -> None:
            if result is None:
                return
            key = _key(todo[index])
            self._results[key] = result
            self._journal.add([key, result])
            self._collected()

        inputs = [tasks[name] for name in todo]
        run_tasks(work, inputs, collect, jobs=jobs, progress=progress)

    def discard(self) -> None:
        """Remove the file."""
        self._journal.close()


def _key(task: Any) -> str:
    text = repr(task)
    # A machine's profile may have been edited since.
    if machine := getattr(task, "machine", None):
        text += _machine_digest(machine)
    return _digest(text)


@cache
def _machine_digest(machine: str) -> str:
    return load_profile(machine).digest


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_Draw = tuple["Workload", Path, bool]


def _draws(specs: Sequence[RunSpec], folder: Path) -> list[_Draw]:
    """Every trace that the runs need, and whether a cache network is trained on it."""
    wanted: dict[tuple[Workload, bool], None] = {}
    for spec in specs:
        wanted[spec.workload, False] = None
        if spec.warm:
            wanted[spec.calibration, False] = None
        if spec.learned:
            wanted[spec.workload, True] = None
    # Networks need their traces, and are long: they come last.
    ordered = sorted(wanted, key=lambda draw: draw[1])
    return [(workload, folder, learned) for workload, learned in ordered]


def _draw(task: _Draw, _progress: Progress) -> None:
    workload, folder, learned = task
    if learned:
        with contextlib.suppress(ImportError):
            learned_cache(workload, folder)
    else:
        workload.draw(folder)


def _do(task: tuple[RunSpec, Path], _progress: Progress) -> tuple[Outcome, str]:
    """The outcome of a run, or what it lacks."""
    spec, folder = task
    begin_s = time.process_time()
    try:
        outcome = spec.do(folder)
        failure = ""
        outcome["cpu_s"] = time.process_time() - begin_s
    except ImportError:
        outcome = {}
        failure = "needs PyTorch: pip install 'moesim[runtime]'"
    except (TraceError, ProfileError, PolicyError) as error:
        outcome = {}
        failure = str(error)
    return outcome, failure


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


def _experiment(
    task: tuple[str, tuple[Path, ...]], _progress: Progress
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Figures and models by trace; an experiment's functions stay in their process."""
    name, traces = task
    done = reproduce(name, traces, steps=EXPERIMENT_STEPS)
    return done.measured, done.models

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
)
from moesim.evidence.reproduction.routing import (
    EXPERIMENTS,
    Reproduction,
    reproduce,
    shared_traces,
)
from moesim.evidence.reproduction.runs import learned_cache
from moesim.evidence.reproduction.workloads import Workload
from moesim.hwprofiles.profile import load_profile
from moesim.hwprofiles.schema import ProfileError
from moesim.policies.base import PolicyError
from moesim.runs.sweeps.execution import run_tasks
from moesim.traces.shipped import resolve_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from moesim.evidence.reproduction.questions import Again, Question
    from moesim.evidence.reproduction.runs import Outcome, RunSpec

    Progress = Callable[[float], None]
    Job = tuple[Callable[[Any, Path], Any], Any]

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
        facts: what the figures were made with, a line each.
    """

    answered: list[Answered]
    outcomes: dict[RunSpec, Outcome]
    failures: dict[RunSpec, str]
    experiments: list[Reproduction]
    facts: list[str]


def reproduce_all(
    out: Path,
    *,
    papers: Iterable[str] | None = None,
    jobs: int | None = None,
    progress: Progress = lambda _share: None,
) -> Reproduced:
    """Answer every record.

    Args:
        out: folder for what is done and for drawn traces, until all is done.
        papers: names of sources; None takes all, and experiments on routing alone with
            them.
        jobs: processes; None takes one per core, two at most.
        progress: called with the share of the work done.

    Raises:
        TraceError, ProfileError, PolicyError: bad input.
    """
    begin_s = time.perf_counter()
    jobs = jobs or min(MOST_JOBS, available_cores())
    asked = questions(papers)
    again = exchanged(asked)
    texts = recorded(asked, shared_traces()) if papers is None else {}
    others = chain(*(each.values() for each in (*again.values(), *texts.values())))
    every = chain(asked, *others)
    runs = list(dict.fromkeys(spec for question in every for spec in question.runs))

    def part(begin: float, end: float) -> Progress:
        return lambda share: progress(begin + (end - begin) * share)

    done = _Done(out, jobs)
    todo = [spec for spec in runs if _key(spec) not in done.results]
    # Those of one trace together, since it is read once then.
    todo.sort(key=lambda spec: (spec.workload.name, repr(spec.options)))
    loads = {spec.workload for spec in todo}
    loads |= {spec.calibration for spec in todo if spec.warm}
    networks = {spec.workload for spec in todo if spec.learned}
    experiments: list[tuple[Any, ...]] = []
    if papers is None:
        traces = _experiment_loads()
        loads |= set(traces)
        experiments = [(name, *traces) for name in EXPERIMENTS]
    # Predictions need their routing, and runs need all.
    routing = {load.routing for load in loads}
    done.make(_jobs(_train, networks) + _jobs(Workload.draw, routing), part(0.0, 0.2))
    done.make(_jobs(Workload.draw, loads - routing), part(0.2, 0.3))
    rest: list[Job] = [(_do, spec) for spec in todo]
    rest += [(_experiment, task) for task in experiments]
    done.add(rest, part(0.3, 1.0))
    reproductions = [
        Reproduction(EXPERIMENTS[task[0]], measured, models, EXPERIMENT_STEPS)
        for task in experiments
        for measured, models in [done.results[_key(task)]]
    ]
    results = {spec: done.results[_key(spec)] for spec in runs}
    outcomes = {spec: outcome for spec, (outcome, _) in results.items() if outcome}

    def figures(changed: Again, question: Question) -> dict[str, list[float]]:
        """Of the same question of other runs, by what was changed; some may be
        missing.
        """
        return {
            name: [
                figure
                for other in of[question.record]
                if (figure := other.figure(outcomes)) is not None
            ]
            for name, of in changed.items()
            if question.record in of
        }

    reproduced = Reproduced(
        answered=[
            Answered(
                question,
                question.figure(outcomes),
                {name: of[0] for name, of in figures(again, question).items() if of},
                figures(texts, question),
            )
            for question in asked
        ],
        outcomes=outcomes,
        failures={spec: failure for spec, (_, failure) in results.items() if failure},
        experiments=reproductions,
        facts=[
            (
                f"moesim {__version__}, commit {git_commit() or 'no checkout'},"
                f" {dt.datetime.now(tz=dt.UTC).date()}"
            ),
            (
                f"{len(outcomes)} runs in {time.perf_counter() - begin_s:.0f} s, in"
                f" {jobs} processes on {os.cpu_count()} cores"
            ),
        ],
    )
    done.discard()
    return reproduced


class _Done:
    """Results by key of the task, and drawn traces, kept in a folder; those of another
    commit are forgotten.
    """

    def __init__(self, out: Path, jobs: int) -> None:
        version = f"{__version__} {git_commit()}"
        self._journal = Journal(out / "reproduction.part.jsonl", version)
        self._jobs = jobs
        self.results: dict[str, Any] = dict(self._journal.lines)
        self.folder = out / "reproduction.part"
        if not self.results:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)

    def make(
        self,
        jobs: Sequence[Job],
        progress: Progress,
        collect: Callable[[int, Any], None] = lambda *_: None,
    ) -> None:
        """Do work in the folder."""
        tasks = [(*job, self.folder) for job in jobs]
        run_tasks(_work, tasks, collect, jobs=self._jobs, progress=progress)

    def add(self, jobs: Sequence[Job], progress: Progress) -> None:
        """Do what is not done yet, and note its results."""
        todo = [job for job in jobs if _key(job[1]) not in self.results]

        def collect(index: int, result: Any) -> None:
            key = _key(todo[index][1])
            self.results[key] = result
            self._journal.add([key, result])

        self.make(todo, progress, collect)

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


def _work(job: tuple[Callable[[Any, Path], Any], Any, Path], _show: Progress) -> Any:
    work, task, folder = job
    return work(task, folder)


def _jobs(
    work: Callable[[Workload, Path], Any], loads: Iterable[Workload]
) -> list[Job]:
    """Work on traces, the longest first."""

    def size(load: Workload) -> tuple[int, str]:
        tokens = load.sequences * (load.prompt + load.generated)
        return -tokens * load.shape.layers * load.shape.experts, load.name

    return [(work, load) for load in sorted(loads, key=size)]


def _train(load: Workload, folder: Path) -> None:
    with contextlib.suppress(ImportError):
        learned_cache(load, folder)


def _do(spec: RunSpec, folder: Path) -> tuple[Outcome, str]:
    """The outcome of a run, or what it lacks."""
    try:
        return spec.do(folder), ""
    except ImportError:
        return {}, "needs PyTorch: pip install 'moesim[runtime]'"
    except (TraceError, ProfileError, PolicyError) as error:
        return {}, str(error)


def _experiment_loads() -> tuple[Workload, ...]:
    """Drawn traces of experiments on routing alone, without predictions.

    Drawn predictions have the published accuracies, so they would prove themselves.
    """
    drawn = {
        run.workload.model: run.workload
        for question in questions(["DALI"])
        for run in question.runs
    }
    # Not Qwen's: it has as many layers and experts as both others together.
    models = ("mixtral-8x7b", "deepseek-v2-lite")
    return tuple(drawn[model].calibration() for model in models)


def _experiment(task: Any, folder: Path) -> tuple[Any, Any]:
    """Figures and models by trace, the shipped one and drawn ones; an experiment's
    functions stay in their process.
    """
    name, *loads = task
    traces = [resolve_trace("tiny"), *(load.draw(folder) for load in loads)]
    done = reproduce(name, traces, steps=EXPERIMENT_STEPS)
    return done.measured, done.models

"""Everything that `moesim reproduce --all` does: draws traces, does the runs behind all
records, and the experiments on routing alone.

What is done is noted in the output folder, so that an interrupted command goes on where
it stopped.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.errors import TraceError
from moesim.base.host_limits import available_cores
from moesim.base.inputs import load_json, read_text
from moesim.base.version import __version__, git_commit
from moesim.evidence.reproduction.questions import (
    Answered,
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
    from moesim.evidence.reproduction.routing_caches import Figures
    from moesim.evidence.reproduction.runs import Outcome, RunSpec
    from moesim.evidence.reproduction.workloads import Workload

MOST_JOBS = 2
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
        experiments: those on routing alone.
        recorded: headline questions, and what they give on each text of recorded
            routing, by recording; empty where there is none.
        machines: ``anchored`` or ``datasheet``.
        facts: what the figures were made with, a line each.
    """

    answered: list[Answered]
    outcomes: dict[RunSpec, Outcome]
    failures: dict[RunSpec, str] = field(default_factory=dict)
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
    progress: Progress | None = None,
) -> Reproduced:
    """Answer every record.

    Args:
        out: folder for a journal of what is done, until all is done.
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
    show = progress or (lambda _share: None)
    if jobs is None:
        jobs = min(MOST_JOBS, available_cores())
    asked = questions(papers)
    texts = recorded(shared_traces()) if papers is None else []
    again = [each for _, groups in texts for each in itertools.chain(*groups.values())]
    specs = dict.fromkeys(run for each in [*asked, *again] for run in each.runs)
    actual = {
        spec: unanchored(spec) if machines == "datasheet" else spec for spec in specs
    }
    wanted = list(dict.fromkeys(actual.values()))
    journal = Journal(out / "reproduction.part.jsonl")
    experiments: list[Reproduction] = []
    # Traces are drawn anew every time: what lay there could be of an older version.
    with tempfile.TemporaryDirectory(prefix="moesim-papers-") as name:
        folder = Path(name)
        draws = _draws([spec for spec in wanted if not journal.has(spec)], folder)
        drawn = _RUNS_SHARE * len(draws) / (len(draws) + len(wanted))
        _in_order(_draw, draws, jobs, lambda share: show(drawn * share))
        done = journal.add_all(
            _do,
            {spec: (spec, folder) for spec in wanted},
            jobs,
            lambda share: show(drawn + (_RUNS_SHARE - drawn) * share),
        )
        if papers is None:
            experiments = _experiments(
                folder,
                journal,
                jobs,
                lambda share: show(_RUNS_SHARE + (1 - _RUNS_SHARE) * share),
            )
    journal.discard()

    failures = {spec: done[run][1] for spec, run in actual.items() if done[run][1]}
    outcomes = {spec: done[run][0] for spec, run in actual.items() if not done[run][1]}
    answered = [Answered(question, question.figure(outcomes)) for question in asked]
    on_texts = [
        (
            Answered(question, question.figure(outcomes)),
            {
                name: [f for each in of if (f := each.figure(outcomes)) is not None]
                for name, of in groups.items()
            },
        )
        for question, groups in texts
    ]
    cpu_s = sum(outcome.get("cpu_s", 0.0) for outcome in outcomes.values())
    today = dt.datetime.now(tz=dt.UTC).date()
    facts = [
        f"moesim {__version__}, commit {git_commit() or 'no checkout'}, {today}",
        (
            f"{len(outcomes)} runs, {cpu_s:.0f} CPU seconds without the drawing of"
            f" traces; {time.perf_counter() - begin_s:.0f} s in {jobs} processes on"
            f" {os.cpu_count()} cores"
        ),
        f"machines: {machines}",
    ]
    return Reproduced(
        answered,
        outcomes,
        failures,
        experiments=experiments,
        recorded=on_texts,
        machines=machines,
        facts=facts,
    )


class Journal:
    """Results by task, each appended to a file as it comes.

    A file of another commit is ignored and overwritten.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[str, Any] = {}
        head = json.dumps([__version__, git_commit()])
        with contextlib.suppress(OSError, ValueError):
            first, *lines = read_text(path).splitlines()
            if first == head:
                for line in lines:
                    key, result = load_json(line)
                    self._results[key] = result
        if not self._results:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(head + "\n", encoding="utf-8")

    def has(self, task: Any) -> bool:
        """Whether a task's result is there."""
        return _key(task) in self._results

    def add_all(
        self,
        work: Callable[[Any, Progress], Any],
        tasks: dict[Any, Any],
        jobs: int,
        progress: Progress,
    ) -> dict[Any, Any]:
        """Do the tasks that are not done yet: name -> result, in the order of tasks."""
        todo = [name for name in tasks if not self.has(name)]

        def collect(index: int, result: Any) -> None:
            key = _key(todo[index])
            self._results[key] = result
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, result]) + "\n")

        inputs = [tasks[name] for name in todo]
        run_tasks(work, inputs, collect, jobs=jobs, progress=progress)
        return {name: self._results[_key(name)] for name in tasks}

    def discard(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def _key(task: Any) -> str:
    text = repr(task)
    # A machine's profile may have been edited since.
    if machine := getattr(task, "machine", None):
        text += load_profile(machine).digest
    return hashlib.sha256(text.encode()).hexdigest()


def _in_order(
    work: Callable[[Any, Progress], Any],
    tasks: Sequence[Any],
    jobs: int,
    progress: Progress,
) -> None:
    run_tasks(work, tasks, lambda _index, _result: None, jobs=jobs, progress=progress)


_Draw = tuple["Workload", Path, bool]


def _draws(specs: Sequence[RunSpec], folder: Path) -> list[_Draw]:
    """Every trace that the runs need, and whether a cache network is trained on it."""
    wanted: dict[tuple[Workload, bool], None] = {}
    for spec in specs:
        wanted[spec.workload, False] = None
        if spec.warm or spec.learned:
            wanted[spec.workload.calibration(), False] = None
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
        outcome, failure = spec.do(folder), ""
        outcome["cpu_s"] = time.process_time() - begin_s
    except ImportError:
        outcome, failure = {}, "needs PyTorch: pip install 'moesim[runtime]'"
    except (TraceError, ProfileError, PolicyError) as error:
        outcome, failure = {}, str(error)
    return outcome, failure


def _experiments(
    folder: Path, journal: Journal, jobs: int, progress: Progress
) -> list[Reproduction]:
    """Experiments on routing alone, on the shipped trace and on drawn ones without
    predictions.

    Drawn predictions have the published accuracies, so they would prove themselves.
    """
    drawn = {
        run.workload.model: run.workload
        for question in questions(["DALI"])
        for run in question.runs
    }
    traces = [resolve_trace("tiny")]
    # Not Qwen's: it has as many layers and experts as both others together.
    traces += [
        drawn[model].calibration().draw(folder)
        for model in ("mixtral-8x7b", "deepseek-v2-lite")
    ]
    tasks = {name: (name, tuple(traces)) for name in EXPERIMENTS}
    done = journal.add_all(_experiment, tasks, jobs, progress)
    return [
        Reproduction(EXPERIMENTS[name], measured, models, EXPERIMENT_STEPS)
        for name, (measured, models) in done.items()
    ]


def _experiment(
    task: tuple[str, tuple[Path, ...]], _progress: Progress
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Figures and models by trace; an experiment's functions stay in their process."""
    name, traces = task
    done = reproduce(name, traces, steps=EXPERIMENT_STEPS)
    return done.measured, done.models

"""All published records against ours: which runs they need, the runs, the figures."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from moesim.hwprofiles.errors import ProfileError
from moesim.policies.base import PolicyError
from moesim.reproduction.papers import dali, daop, flashmoe, hybrimoe, smoe
from moesim.reproduction.papers.question import (
    ANCHORED,
    COMPUTED,
    SIMULATED,
    Question,
)
from moesim.reproduction.papers.runs import learned_cache
from moesim.reproduction.records import records
from moesim.runs.machine import cores
from moesim.sweeps.execution import run_tasks
from moesim.traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from moesim.reproduction.papers.question import Answers
    from moesim.reproduction.papers.runs import Outcome, RunSpec
    from moesim.reproduction.papers.workloads import Workload
    from moesim.reproduction.records import Record

PAPERS: dict[str, Answers] = {
    "DALI": dali.ANSWERS,
    "HybriMoE": hybrimoe.ANSWERS,
    "DAOP": daop.ANSWERS,
    "SMoE": smoe.ANSWERS,
    "FlashMoE": flashmoe.ANSWERS,
}
MOST_JOBS = 2

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Answered:
    """A record with what we have for it.

    Attributes:
        question: how it is answered.
        ours: in the record's unit; None where there is none.
    """

    question: Question
    ours: float | None

    @property
    def record(self) -> Record:
        """What was published."""
        return self.question.record

    @property
    def compared(self) -> bool:
        """Whether ours may be held against the published figure."""
        counts = self.question.status in {SIMULATED, COMPUTED}
        return counts and self.ours is not None and self.published is not None

    @property
    def published(self) -> float | None:
        """The published number; None for words."""
        value = self.record.value
        return float(value) if isinstance(value, int | float) else None

    @property
    def ratio(self) -> float | None:
        """Ours over published, where both are numbers."""
        if self.ours is None or not self.published:
            return None
        return self.ours / self.published


@dataclass(slots=True)
class Reproduced:
    """All records that the papers' files know, with the outcomes behind them.

    Attributes:
        answered: in the order of the sources.
        outcomes: run -> its metrics.
        failures: run -> why it could not be done.
        machines: ``anchored`` or ``datasheet``.
        wall_s: of drawing and running.
    """

    answered: list[Answered]
    outcomes: dict[RunSpec, Outcome]
    failures: dict[RunSpec, str] = field(default_factory=dict)
    machines: str = "anchored"
    wall_s: float = 0.0


def questions(papers: Iterable[str] | None = None) -> list[Question]:
    """Every record that a file of this package knows, as a question.

    Args:
        papers: names of sources; None takes all.
    """
    wanted = set(PAPERS if papers is None else papers)
    return [
        answer(record)
        for record in records()
        if record.source in wanted
        and (answer := PAPERS[record.source].get((record.ref, record.metric)))
    ]


def reproduce_all(
    folder: Path,
    *,
    papers: Iterable[str] | None = None,
    machines: str = "anchored",
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Reproduced:
    """Answer every record.

    Args:
        folder: for traces; what lies there already is taken.
        papers: names of sources; None takes all.
        machines: ``anchored``, or ``datasheet`` for machines of which nothing was
            taken from a paper.
        jobs: runs at the same time; None takes one per core, two at most.
        progress: called with the share of the work done.

    Raises:
        TraceError, ProfileError, PolicyError: bad input.
    """
    begin_s = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    asked = questions(papers)
    specs = _distinct(run for question in asked for run in question.runs)
    if machines == "datasheet":
        actual = {spec: spec.unanchored() for spec in specs}
    else:
        actual = {spec: spec for spec in specs}
    distinct = _distinct(actual.values())

    if jobs is None:
        jobs = min(MOST_JOBS, cores())
    report = progress or (lambda _share: None)
    draws = _draws(distinct, folder)
    drawn = len(draws) / (len(draws) + len(distinct))
    in_order(_draw, draws, jobs=jobs, progress=lambda share: report(drawn * share))
    done = in_order(
        _do,
        [(spec, folder) for spec in distinct],
        jobs=jobs,
        progress=lambda share: report(drawn + (1 - drawn) * share),
    )

    by_spec = dict(zip(distinct, done, strict=True))
    outcomes = {}
    failures = {}
    for spec, done_as in actual.items():
        outcome, failure = by_spec[done_as]
        if failure:
            failures[spec] = failure
        else:
            outcomes[spec] = outcome
    answered = [Answered(question, _ours(question, outcomes)) for question in asked]
    wall_s = time.perf_counter() - begin_s
    return Reproduced(answered, outcomes, failures, machines, wall_s)


def in_order(
    work: Callable[[Task, Callable[[float], None]], Result],
    tasks: Sequence[Task],
    *,
    jobs: int,
    progress: Callable[[float], None],
) -> list[Result]:
    """Results of independent tasks in the order of the tasks; see `run_tasks`."""
    results: dict[int, Result] = {}
    run_tasks(work, tasks, results.__setitem__, jobs=jobs, progress=progress)
    return [results[index] for index in range(len(tasks))]


def _distinct(specs: Iterable[RunSpec]) -> list[RunSpec]:
    # A dict keeps the order of first appearance, which a set would lose.
    return list(dict.fromkeys(specs))


def _ours(question: Question, outcomes: Mapping[RunSpec, Outcome]) -> float | None:
    if question.figure is None:
        return None
    # What a run lacked is said below the table.
    if any(run not in outcomes for run in question.runs):
        return None
    return question.figure([outcomes[run] for run in question.runs])


_Draw = tuple["Workload", "Path", bool]


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


def _draw(task: _Draw, _progress: Callable[[float], None]) -> None:
    workload, folder, learned = task
    if learned:
        with contextlib.suppress(ImportError):
            learned_cache(workload, folder)
    else:
        workload.draw(folder)


def _do(
    task: tuple[RunSpec, Path], _progress: Callable[[float], None]
) -> tuple[Outcome, str]:
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


def anchors() -> set[tuple[str, str, str]]:
    """Keys of records that questions name as anchors, with the workloads' inputs."""
    keys = set()
    for question in questions():
        if question.status == ANCHORED:
            keys.add(question.record.key)
        for run in question.runs:
            keys.update(run.workload.inputs)
    return keys

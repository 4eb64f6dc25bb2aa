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
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Any

from joblib import Memory

from moesim.base.errors import TraceError
from moesim.base.host_limits import available_cores
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
from moesim.hwprofiles.profile import load_profile
from moesim.hwprofiles.schema import ProfileError
from moesim.policies.base import PolicyError
from moesim.runs.sweeps.execution import run_tasks
from moesim.traces.shipped import resolve_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from moesim.evidence.reproduction.questions import Again, Question
    from moesim.evidence.reproduction.runs import Outcome, RunSpec
    from moesim.evidence.reproduction.workloads import Workload

    Progress = Callable[[float], None]
    Job = Callable[[], Any]

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

    loads = {spec.workload for spec in runs}
    loads |= {spec.calibration for spec in runs if spec.warm}
    networks = {spec.workload for spec in runs if spec.learned}
    experiments: list[Any] = []
    if papers is None:
        traces = _experiment_loads()
        loads |= set(traces)
        experiments = [(name, *traces) for name in EXPERIMENTS]
    # Those of one trace together, since it is read once then.
    runs.sort(key=lambda spec: (spec.workload.name, repr(spec.options)))
    folder = _folder(out)
    # A machine's profile may have been edited since.
    kept = Memory(folder, verbose=0).cache(_kept, ignore=["folder"])
    digests = {name: load_profile(name).digest for name in {r.machine for r in runs}}

    def carry_out(work: Iterable[Job], begin: float, end: float) -> list[Any]:
        todo = list(work)
        results: list[Any] = [None] * len(todo)

        def show(share: float) -> None:
            progress(begin + (end - begin) * share)

        run_tasks(_work, todo, results.__setitem__, jobs=jobs, progress=show)
        return results

    # Predictions need their routing, and runs need all.
    routing = {load.routing for load in loads}
    trained = (partial(_train, load, folder) for load in _longest_first(networks))
    drawn = (partial(load.draw, folder) for load in _longest_first(routing))
    carry_out(chain(trained, drawn), 0.0, 0.2)
    predicted = _longest_first(loads - routing)
    carry_out((partial(load.draw, folder) for load in predicted), 0.2, 0.3)
    replayed = (partial(kept, _do, run, digests[run.machine], folder) for run in runs)
    counted = (partial(kept, _experiment, task, "", folder) for task in experiments)
    results = carry_out(chain(replayed, counted), 0.3, 1.0)
    reproductions = [
        Reproduction(EXPERIMENTS[task[0]], measured, models, EXPERIMENT_STEPS)
        for task, (measured, models) in zip(
            experiments, results[len(runs) :], strict=True
        )
    ]
    done = dict(zip(runs, results, strict=False))
    outcomes = {spec: outcome for spec, (outcome, _) in done.items() if outcome}

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
        failures={spec: failure for spec, (_, failure) in done.items() if failure},
        experiments=reproductions,
        facts=[
            (
                f"moesim {__version__}, commit {git_commit() or 'no checkout'},"
                f" {dt.datetime.now(tz=dt.UTC).date()}"
            ),
            (
                f"{len(outcomes)} runs in {time.perf_counter() - begin_s:.0f} s,"
                f" {jobs} at a time, on {os.cpu_count()} cores"
            ),
        ],
    )
    shutil.rmtree(folder)
    return reproduced


def _folder(out: Path) -> Path:
    """Where traces and results lie until all is done; those of another commit are
    forgotten.
    """
    version = f"{__version__} {git_commit()}"
    folder = out / f"reproduction-{sha256(version.encode()).hexdigest()[:8]}.part"
    for other in out.glob("reproduction-*.part"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    return folder


def _kept(work: Callable[..., Any], task: Any, digest: str, folder: Path) -> Any:
    """Work whose result is kept in the folder; `digest` is what else it depends on."""
    del digest
    return work(task, folder)


def _work(job: Job, _show: Progress) -> Any:
    return job()


def _longest_first(loads: Iterable[Workload]) -> list[Workload]:
    def size(load: Workload) -> tuple[int, str]:
        tokens = load.sequences * (load.prompt + load.generated)
        return -tokens * load.shape.layers * load.shape.experts, load.name

    return sorted(loads, key=size)


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

"""Everything that `moesim reproduce --all` does: draws traces, and does the runs behind
all records.

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
from moesim.base.host import available_cores
from moesim.base.version import __version__, git_commit
from moesim.evidence.reproduction.questions import (
    Answered,
    exchanged,
    questions,
)
from moesim.evidence.reproduction.runs import learned_cache
from moesim.hwprofiles.profile import load_profile
from moesim.hwprofiles.schema import ProfileError
from moesim.policies.base import PolicyError
from moesim.runs.sweeps.execution import run_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from moesim.evidence.reproduction.questions import Again, Question
    from moesim.evidence.reproduction.runs import Outcome, RunSpec
    from moesim.evidence.reproduction.workloads import Workload

    Progress = Callable[[float], None]
    Job = Callable[[], Any]

MOST_JOBS = 2


@dataclass(slots=True)
class Reproduced:
    """All records, with the outcomes behind them.

    Attributes:
        answered: in the order of the sources.
        outcomes: run -> its metrics.
        failures: run -> why it could not be done.
        facts: what the figures were made with, a line each.
    """

    answered: list[Answered]
    outcomes: dict[RunSpec, Outcome]
    failures: dict[RunSpec, str]
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
        papers: names of sources; None takes all.
        jobs: processes; None takes one per core, two at most.
        progress: called with the share of the work done.

    Raises:
        TraceError, ProfileError, PolicyError: bad input.
    """
    begin_s = time.perf_counter()
    jobs = jobs or min(MOST_JOBS, available_cores())
    asked = questions(papers)
    again = exchanged(asked)
    others = chain(*(each.values() for each in again.values()))
    every = chain(asked, *others)
    runs = list(dict.fromkeys(spec for question in every for spec in question.runs))

    loads = {spec.workload for spec in runs}
    loads |= {spec.calibration for spec in runs if spec.warm}
    networks = {spec.workload for spec in runs if spec.learned}
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
    results = carry_out(replayed, 0.3, 1.0)
    done = dict(zip(runs, results, strict=True))
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
            )
            for question in asked
        ],
        outcomes=outcomes,
        failures={spec: failure for spec, (_, failure) in done.items() if failure},
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

"""Everything that `moesim reproduce --all` does: the runs behind all records, on traces
that are drawn for them.

What is done is noted in the output folder, so that an interrupted command goes on where
it stopped.
"""

from __future__ import annotations

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
from moesim.evidence.reproduction.questions import Answered, exchanged, questions
from moesim.hwprofiles.schema import ProfileError
from moesim.policies.base import PolicyError
from moesim.runs.sweeps.execution import run_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from moesim.evidence.reproduction.runs import Outcome, RunSpec
    from moesim.evidence.reproduction.workloads import Workload

MOST_JOBS = 2


@dataclass(slots=True)
class Reproduced:
    """All records, with the runs behind them.

    Attributes:
        answered: in the order of the sources.
        failures: run -> why it could not be done.
        facts: what the figures were made with, a line each.
    """

    answered: list[Answered]
    failures: dict[RunSpec, str]
    facts: list[str]


def reproduce_all(
    out: Path,
    *,
    papers: Iterable[str] | None = None,
    jobs: int | None = None,
    progress: Callable[[float], None] = lambda _share: None,
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
    every = chain(asked, *(of.values() for of in again.values()))
    # Runs of one routing share its traces, so that one process draws and reads them.
    groups: dict[Workload, list[RunSpec]] = {}
    for spec in dict.fromkeys(spec for question in every for spec in question.runs):
        groups.setdefault(spec.workload.routing, []).append(spec)
    todo = sorted(groups.values(), key=_size, reverse=True)
    for group in todo:
        group.sort(key=lambda spec: (spec.workload.name, repr(spec.options)))
    runs = sum(map(len, todo))
    outcomes: dict[RunSpec, Outcome] = {}
    failures: dict[RunSpec, str] = {}

    def collect(index: int, results: list[Outcome | str]) -> None:
        for spec, result in zip(todo[index], results, strict=True):
            if isinstance(result, str):
                failures[spec] = result
            else:
                outcomes[spec] = result
        progress((len(outcomes) + len(failures)) / runs)

    folder = _folder(out)
    run_tasks(partial(_do_all, folder), todo, collect, jobs=jobs)
    reproduced = Reproduced(
        answered=[
            Answered(
                question,
                question.figure(outcomes),
                {
                    name: figure
                    for name, of in again.items()
                    if question.record in of
                    and (figure := of[question.record].figure(outcomes)) is not None
                },
            )
            for question in asked
        ],
        failures=failures,
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


def _size(group: list[RunSpec]) -> int:
    """How much work runs of one routing are."""
    load = group[0].workload
    tokens = load.sequences * (load.prompt + load.generated)
    return len(group) * tokens * load.shape.layers * load.shape.experts


def _do_all(
    folder: Path, group: list[RunSpec], _show: Callable[[float], None]
) -> list[Any]:
    """Outcomes of runs, of which those that are in the folder are not done again."""
    done = Memory(folder, verbose=0).cache(_do, ignore=["folder"])
    return [done(spec, folder) for spec in group]


def _do(spec: RunSpec, folder: Path) -> Outcome | str:
    """The outcome of a run, or what it lacks."""
    try:
        return spec.do(folder)
    except ImportError:
        return "needs PyTorch: pip install 'moesim[runtime]'"
    except (TraceError, ProfileError, PolicyError) as error:
        return str(error)

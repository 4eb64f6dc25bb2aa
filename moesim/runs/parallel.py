"""A process pool for replays: joblib's workers, with a count of work done so far.

The results are the same whatever the number of processes. Workers are killed when the
run is interrupted, so a caller that lets them write files clears up after them.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from moesim.traces.files import ScratchFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

Task = TypeVar("Task")
Result = TypeVar("Result")
Work = Callable[[Task, Callable[[int], None]], Result]
"""Processes one task; calls its second argument with the rows done since the last
call.
"""

ROWS_PER_PROCESS = 50_000
"""Rows to replay that outweigh the start of a process: about three seconds of work
against one of imports.
"""

POLL_INTERVAL_S = 0.2
"""Seconds between two readings of the progress counters."""


def cores() -> int:
    """Cores that this process may use."""
    # macOS and Windows have no affinity masks.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_tasks(
    work: Work[Task, Result],
    tasks: Sequence[Task],
    *,
    jobs: int | None,
    rows: int,
    progress: Callable[[int], None] | None = None,
) -> list[Result]:
    """Apply `work` to every task, in this process or in several.

    With several jobs, work, tasks and results are pickled.

    Args:
        work: called with a task and a function that counts rows.
        tasks: inputs, independent of each other.
        jobs: tasks at the same time; None takes one per core, but only as many as the
            work is worth.
        rows: rows of traces that all tasks together replay.
        progress: called with the rows done so far.

    Returns:
        Results in the order of the tasks.

    Raises:
        ChildProcessError: a worker was killed from outside.
        Exception: what `work` raises; the other tasks are then abandoned.
    """
    if jobs is None:
        jobs = min(cores(), rows // ROWS_PER_PROCESS)
    # A process without a task would only cost its start.
    jobs = min(jobs, len(tasks))
    report = progress or (lambda _rows: None)

    if jobs > 1:
        return _in_processes(work, tasks, jobs, report)

    done = 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        report(done)

    return [work(task, count) for task in tasks]


def _in_processes(
    work: Work[Task, Result],
    tasks: Sequence[Task],
    jobs: int,
    report: Callable[[int], None],
) -> list[Result]:
    # A tenth of a second that a run in one process need not pay.
    from joblib import Parallel, delayed  # noqa: PLC0415
    from joblib.externals.loky import get_reusable_executor  # noqa: PLC0415
    from joblib.externals.loky.process_executor import (  # noqa: PLC0415
        TerminatedWorkerError,
    )

    # One task at a time for each worker: replays are long, and of unequal length.
    pool = Parallel(jobs, backend="loky", batch_size=1, initializer=_ignore_signals)
    with ScratchFolder() as folder:
        # One counter per task in a shared file: no lock, as each has one writer.
        file = folder / "rows"
        counters = np.memmap(file, np.int64, "w+", shape=len(tasks))
        calls = [
            delayed(_counted)(work, task, file, index)
            for index, task in enumerate(tasks)
        ]
        with _polled(counters, report):
            try:
                results: list[Result] = pool(calls)
            except TerminatedWorkerError:
                raise ChildProcessError(
                    errno.ECHILD,
                    "one of the processes was killed, perhaps for want of memory; try"
                    " --jobs 1",
                ) from None
    # Workers that wait for more work would keep their memory, their folder and their
    # environment. They hold nothing any more, so they need not end by themselves.
    get_reusable_executor(kill_workers=True).shutdown()
    return results


def _ignore_signals() -> None:
    # A terminal sends ctrl-C to every process; the parent alone decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _counted(work: Work[Task, Result], task: Task, file: Path, index: int) -> Result:
    counters = np.memmap(file, np.int64, "r+")

    def count(rows: int) -> None:
        counters[index] += rows

    return work(task, count)


@contextmanager
def _polled(counters: np.ndarray, report: Callable[[int], None]) -> Iterator[None]:
    """Report the sum of the counters while the block runs, and once after it."""
    finished = threading.Event()

    def poll() -> None:
        while not finished.wait(POLL_INTERVAL_S):
            report(int(counters.sum()))

    # The main thread waits in joblib, so a second one has to look.
    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
    report(int(counters.sum()))

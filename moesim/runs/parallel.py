"""The same work on many inputs, by one process or by several; the results are the same,
and stopping is clean.

A process that copies tables to disk must not be killed in the middle of it. So none is:
all look at one flag after every forward pass, and whoever finds it set gives up as if
ctrl-C had been pressed there.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.sharedctypes import Synchronized
    from multiprocessing.synchronize import Event

Task = TypeVar("Task")
Result = TypeVar("Result")
Work = Callable[[Task, Callable[[int], None]], Result]
"""What is done with each input; it tells how much it has done since it last told."""
WEIGHT_PER_PROCESS = 50_000
"""Rows to be replayed that outweigh the start of a process: some three seconds against
one.
"""
LOOK_S = 0.2
"""Seconds between two looks at how far the processes are."""


def cores() -> int:
    """Cores that this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def share_out(
    work: Work[Task, Result],
    tasks: Sequence[Task],
    *,
    jobs: int | None,
    weight: int,
    progress: Callable[[int], None] | None = None,
) -> list[Result]:
    """Do `work` on every task; with several jobs, work, tasks and results travel
    between processes.

    Args:
        jobs: tasks at the same time; None takes one per core, and no more than the work
            is worth.
        weight: rows of traces that all tasks together replay.
        progress: told how much is done in all.

    Returns:
        Results in the order of the tasks.

    Raises:
        ChildProcessError: a process was killed from outside.
        Exception: what `work` raises; then no other task goes on.
    """
    if jobs is None:
        jobs = min(cores(), weight // WEIGHT_PER_PROCESS)
    jobs = min(jobs, len(tasks))
    show = progress or (lambda _done: None)
    if jobs > 1:
        return _in_processes(work, tasks, jobs, show)
    done = 0

    def tell(more: int) -> None:
        nonlocal done
        done += more
        show(done)

    return [work(task, tell) for task in tasks]


def _in_processes(
    work: Work[Task, Result],
    tasks: Sequence[Task],
    jobs: int,
    show: Callable[[int], None],
) -> list[Result]:
    # A fork would copy locks of threads that it does not copy.
    context = get_context("spawn")
    done = context.Value("q", 0)
    stop = context.Event()
    pool = ProcessPoolExecutor(jobs, context, _begin, (work, done, stop))
    try:
        futures = [pool.submit(_do, task) for task in tasks]
        waiting = set(futures)
        while waiting:
            finished, waiting = wait(waiting, LOOK_S, FIRST_EXCEPTION)
            for future in finished:
                future.result()
            show(done.value)
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise ChildProcessError(
            errno.ECHILD,
            "one of the processes was killed, perhaps for want of memory; try --jobs 1",
        ) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


_mine: tuple[Any, Synchronized[int], Event]
"""What a process of the pool was started with."""


def _begin(work: Any, done: Synchronized[int], stop: Event) -> None:
    global _mine  # noqa: PLW0603 - a pool hands its processes nothing else to keep it in
    _mine = (work, done, stop)
    # They may reach all at once; the first process tells the others.
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):
        signal.signal(number, signal.SIG_IGN)


def _do(task: Any) -> Any:
    work, done, stop = _mine

    def tell(more: int) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        with done.get_lock():
            done.value += more

    return work(task, tell)

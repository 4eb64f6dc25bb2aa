"""Runs independent tasks in this process, in several, or on a Dask cluster.

Results are the same wherever tasks run. Local processes are joblib's; both they and a
cluster are used as executors of the standard library, so one loop serves them. A worker
that is killed costs its tasks only: they run again.
"""

from __future__ import annotations

import errno
import functools
import re
import signal
import sys
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moesim.base.errors import TraceError
from moesim.base.files import sha256
from moesim.base.host import available_cores
from moesim.base.options import ConfigError
from moesim.policies.registry import registered, restore
from moesim.traces.format.reader import Trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Task = TypeVar("Task")
Result = TypeVar("Result")
Work = Callable[[Task, Callable[[float], None]], Result]
"""Carries out one task; calls its second argument with the share that is done."""

ROWS_PER_PROCESS = 50_000
"""Rows to replay that outweigh the start of a process: about three seconds of work
against one of imports.
"""

MOST_RESTARTS = 3
"""Times that processes are started again without a result in between."""

STOPS = (signal.SIGINT, signal.SIGTERM)

END_LIMIT_S = 0.5
"""Seconds to wait for a process that was killed."""

IDLE_S = 10.0
"""Seconds after which a worker without a task ends, as those of a killed parent."""


def run_tasks(
    work: Work[Task, Result],
    tasks: Sequence[Task],
    collect: Callable[[int, Result], None],
    *,
    jobs: int | None = 1,
    cluster: str | None = None,
    rows: int = 0,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Carry out every task, and hand over each result as it comes.

    Work, tasks and results are pickled unless one process does everything. Policies
    that were registered here by hand are known to all workers.

    Args:
        work: called with a task and a function that takes the share of it that is done.
        tasks: inputs, independent of each other.
        collect: called in this process with the place of a task and its result, in the
            order in which they end.
        jobs: tasks at the same time on this machine; None takes one per core, but only
            as many as the work is worth.
        cluster: address of a Dask scheduler; then `jobs` is ignored.
        rows: rows of traces that all tasks together replay.
        progress: called with the share of all tasks that is done.

    Raises:
        ConfigError: no such cluster, or fewer jobs than one.
        ImportError: a cluster, without Dask.
        ChildProcessError: workers were killed time and again.
        Exception: what `work` or `collect` raises; other tasks are then abandoned.
    """
    report = progress or (lambda _share: None)
    # Also false of what is no number.
    if jobs is not None and not jobs >= 1:
        raise ConfigError(f"jobs: expected a whole number >= 1, got {jobs!r}")
    if jobs is None:
        jobs = max(1, min(available_cores(), rows // ROWS_PER_PROCESS))
    # A process without a task would only cost its start.
    jobs = min(jobs, len(tasks))

    if cluster is not None:
        with connected(cluster) as remote:
            _run_elsewhere(lambda: remote, work, tasks, collect, report)
    elif jobs > 1:
        _start_resource_trackers()
        _run_elsewhere(partial(_processes, jobs), work, tasks, collect, report)
    else:
        for index, task in enumerate(tasks):

            def show(share: float, done: int = index) -> None:
                report((done + share) / len(tasks))

            collect(index, work(task, show))
            show(1.0)


def _run_elsewhere(
    started: Callable[[], Any],
    work: Work[Task, Result],
    tasks: Sequence[Task],
    collect: Callable[[int, Result], None],
    report: Callable[[float], None],
) -> None:
    """Carry out tasks in an executor; what is left of one whose workers were killed, in
    a new one.
    """
    call = partial(_carry_out, work, registered())
    # A dict keeps the order and forgets quickly.
    todo = dict(enumerate(tasks))
    restarts = 0
    while todo:
        count = len(todo)
        executor: Any = None
        try:
            with _stops_wait():
                executor = started()
                places = {executor.submit(call, todo[index]): index for index in todo}
            for future in as_completed(places):
                index = places.pop(future)
                collect(index, future.result())
                del todo[index]
                report(1 - len(todo) / len(tasks))
        except BrokenExecutor:
            # A task that kills every worker must not be tried for ever.
            restarts = restarts + 1 if len(todo) == count else 0
            if restarts > MOST_RESTARTS:
                raise ChildProcessError(
                    errno.ECHILD,
                    "processes were killed again and again, perhaps for want of memory;"
                    " try --jobs 1",
                ) from None
        finally:
            _end(executor)


def _carry_out(work: Work[Task, Result], policies: Any, task: Task) -> Result:
    """Carry out a task in a worker, given policies that only its parent knows."""
    restore(policies)
    return work(task, lambda _share: None)


def _processes(count: int) -> Any:
    """Processes on this machine, which begin with their first task."""
    # A tenth of a second that a run in one process need not pay.
    from joblib.externals.loky import ProcessPoolExecutor  # noqa: PLC0415

    return ProcessPoolExecutor(count, timeout=IDLE_S)


def _end(executor: Any) -> None:
    """End the processes of a pool at once; a cluster replaces its workers itself."""
    processes = getattr(executor, "_processes", None)
    if processes is None:
        return
    import psutil  # noqa: PLC0415 - runs in one process need none

    # The pool's own way stumbles over tasks that wait.
    processes = dict(processes)
    for number in processes:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(number).kill()
    for process in processes.values():
        process.join(END_LIMIT_S)
    executor.shutdown(wait=False, kill_workers=True)


def _start_resource_trackers() -> None:
    """Start the processes in which libraries keep account of what processes share.

    Starting them lets stops through, so it must not happen while these wait.
    """
    from multiprocessing import resource_tracker  # noqa: PLC0415 - as below

    # A tenth of a second that a run in one process need not pay.
    from joblib.externals.loky import backend  # noqa: PLC0415

    # They inherit it, and remove in silence what an interrupted command shared.
    sys.warnoptions.append("ignore")
    resource_tracker.ensure_running()
    backend.resource_tracker.ensure_running()
    sys.warnoptions.remove("ignore")


@contextmanager
def _stops_wait() -> Iterator[None]:
    """Let ctrl-C and SIGTERM wait until the block is done.

    A terminal sends ctrl-C to every process of a group, and an interpreter that meets
    it before it runs a line of ours prints a traceback. Processes and threads that
    start in the block inherit that both are masked.
    """
    # Windows has no masks.
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- a Dask cluster --------------------------------------------------------------------
# Dask is imported here only, and only when a cluster is asked for. Its own executor is
# used, not joblib's backend for it: that one waits for ever for a task whose workers
# die (joblib 1.6).

WAIT_FOR_SCHEDULER_S = 10
"""Seconds after which a scheduler that does not answer, or has no workers, counts as
missing.
"""

_ADDRESS = re.compile(r"(tcp|tls|ws|wss|ucx)://.+")


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect to a cluster while the block runs: an executor, which runs the
    tasks of a lost worker again on another one.

    Args:
        address: of a scheduler, such as ``tcp://192.168.0.5:8786``.

    Raises:
        ConfigError: it is no address, nobody answers, or nobody works there.
        ConnectionResetError: the cluster is gone.
        ChildProcessError: a task was killed on several workers.
        ImportError: without Dask.
    """
    if not _ADDRESS.fullmatch(address):
        raise ConfigError(
            "--cluster: expected the address of a Dask scheduler such as"
            f" tcp://192.168.0.5:8786, got {address!r}; processes on this machine are"
            " --jobs"
        )
    # Seconds that only users of clusters pay.
    from distributed import Client, KilledWorker  # noqa: PLC0415

    try:
        client = Client(address, timeout=WAIT_FOR_SCHEDULER_S)
    # It raises the other where the address stands for no machine at all.
    except (OSError, RuntimeError):
        raise ConfigError(
            f"--cluster: no Dask scheduler answers at {address}; start one with `dask"
            " scheduler`"
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=WAIT_FOR_SCHEDULER_S)
        except TimeoutError:
            raise ConfigError(
                f"--cluster: nobody works for {address}; start `dask worker {address}"
                " --nthreads 1`, once for each core"
            ) from None
        try:
            yield client.get_executor()
        except CancelledError:
            reason = "the Dask cluster is gone"
            raise ConnectionResetError(errno.ECONNRESET, reason) from None
        except KilledWorker:
            raise ChildProcessError(
                errno.ECHILD,
                "a task was tried on several workers of the cluster, and each was"
                " killed, perhaps for want of memory",
            ) from None


@functools.lru_cache(maxsize=16)
def open_shared(path: str, digest: str) -> Trace:
    """Open a trace where a task runs.

    Args:
        path: where it lies on the machine that named it.
        digest: SHA-256 of the file.

    Raises:
        TraceError: it does not lie there on this machine.
    """
    place = Path(path)
    if place.is_file() and sha256(place) == digest:
        return open_trace(place)
    raise TraceError(
        f"{path}: expected a file with SHA-256 {digest:.12}…, found none on this"
        " machine; put it there, under the same path, unless it has changed since the"
        " sweep began"
    )

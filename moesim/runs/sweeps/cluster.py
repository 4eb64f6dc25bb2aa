"""A Dask cluster as the place where tasks run.

Dask is imported here only, and only when a cluster is asked for.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.errors import TraceError
from moesim.base.files import sha256
from moesim.base.options import ConfigError
from moesim.runs.sweeps.plan import code_digest
from moesim.traces.format.reader import Trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

WAIT_FOR_SCHEDULER_S = 10
"""Seconds after which a scheduler that does not answer, or has no workers, counts as
missing.
"""

STRAGGLE_S = 1.0
"""Seconds in which workers whose start was under way appear."""

_LOCAL = re.compile(r"local:([1-9]\d*)")
_ADDRESS = re.compile(r"(tcp|tls|ws|wss|ucx)://.+")


class DaskExecutor:
    """The workers of a Dask cluster, as an `Executor` of `execution.py`.

    Dask itself runs the tasks of a lost worker again on another one.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._executor = client.get_executor()

    @property
    def workers(self) -> int:
        """Tasks at the same time, on the workers that are there now."""
        return max(1, sum(self._client.nthreads().values()))

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Carry out a call on some worker."""
        sent = self._executor.submit(function, *arguments)
        answer: Future[Any] = Future()

        def answered(done: Future[Any]) -> None:
            try:
                answer.set_result(done.result())
            except CancelledError:
                answer.set_exception(
                    ConnectionResetError(errno.ECONNRESET, "the Dask cluster is gone")
                )
            except Exception as error:  # noqa: BLE001 - handed on to who waits
                answer.set_exception(_for_users(error))

        sent.add_done_callback(answered)
        return answer

    def restart(self) -> None:
        """Do nothing: the cluster replaces its workers itself."""


def _for_users(error: Exception) -> Exception:
    # A class of Dask, which is not imported without need.
    if type(error).__name__ == "KilledWorker":
        return ChildProcessError(
            errno.ECHILD,
            "a task was tried on several workers of the cluster, and each was killed,"
            " perhaps for want of memory",
        )
    return error


@contextmanager
def _log_of_dask() -> Iterator[logging.Logger]:
    """Dask's log, whose level may be changed while the block runs."""
    log = logging.getLogger("distributed")
    level = log.level
    try:
        yield log
    finally:
        log.setLevel(level)


@contextmanager
def connected(address: str, files: Mapping[str, Path]) -> Iterator[DaskExecutor]:
    """Connect to a cluster while the block runs.

    Args:
        address: of a scheduler, such as ``tcp://192.168.0.5:8786``, or ``local:N``,
            which starts N worker processes on this machine.
        files: by digest, those that workers read; copied to those that lack them.

    Raises:
        ConfigError: it is no address, nobody answers, nobody works there, or workers
            have another moesim.
        ImportError: without Dask.
    """
    local = _LOCAL.fullmatch(address)
    if local is None and not _ADDRESS.fullmatch(address):
        raise ConfigError(
            "--cluster: expected the address of a Dask scheduler such as"
            f" tcp://192.168.0.5:8786, or local:N, got {address!r}"
        )
    # Seconds that only users of clusters pay.
    import psutil  # noqa: PLC0415
    from distributed import Client, LocalCluster  # noqa: PLC0415

    if local is not None:
        with (
            _without_stragglers() as started,
            _log_of_dask() as log,
            _loop_without_stops() as loop,
            LocalCluster(
                n_workers=int(local[1]),
                threads_per_worker=1,
                # Any free port: its usual one may be another cluster's.
                dashboard_address="127.0.0.1:0",
                # Results are small, and a full disk is none of their business.
                memory_limit=0,
                # Workers that outlive the scheduler by a moment would report that.
                silence_logs=logging.CRITICAL,
                loop=loop,
            ) as cluster,
            Client(cluster) as client,
        ):
            workers = client.run(_ignore_interrupts)
            started.extend(workers.values())
            try:
                yield DaskExecutor(client)
            except BaseException:
                # They hold nothing that needs an orderly end, which takes seconds. That
                # their connections break is no news to anybody.
                log.setLevel(logging.CRITICAL)
                for number in workers.values():
                    with suppress(psutil.NoSuchProcess):
                        psutil.Process(number).kill()
                raise
        return

    try:
        client = Client(address, timeout=WAIT_FOR_SCHEDULER_S)
    # It raises the other where the address stands for no machine at all.
    except (OSError, RuntimeError):
        raise ConfigError(
            f"--cluster: no Dask scheduler answers at {address}; start one with `dask"
            " scheduler`"
        ) from None
    with client:
        _check_workers(client, address)
        _send_missing(client, files)
        yield DaskExecutor(client)


@contextmanager
def _without_stragglers() -> Iterator[list[int]]:
    """End the workers that are still starting when the block fails; it names those that
    have started. They would miss what this process shares with them, and report that.
    """
    started: list[int] = []
    try:
        yield started
    except BaseException:
        if not started:
            # That they ended is no news to anybody.
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)
            _end_stragglers()
        raise


def _end_stragglers() -> None:
    import psutil  # noqa: PLC0415 - as above

    until_s = time.monotonic() + STRAGGLE_S
    # Threads of Dask may be about to start one.
    while time.monotonic() < until_s:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if "spawn_main" in str(child.cmdline()):
                    child.kill()
        time.sleep(STRAGGLE_S / 20)


@contextmanager
def _loop_without_stops() -> Iterator[Any]:
    """Run an event loop in a thread that masks ctrl-C and SIGTERM while the block runs;
    the worker processes that it starts inherit that.
    """
    from distributed.utils import LoopRunner  # noqa: PLC0415 - as above

    start_resource_trackers()
    runner = LoopRunner()
    with stops_wait():
        runner.start()
    try:
        yield runner.loop
    finally:
        runner.stop()


def _ignore_interrupts() -> int:
    """Leave ctrl-C to the process that started this one; return the number of this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # It began with both masked, and may be ended by SIGTERM from now on.
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    return os.getpid()


def _check_workers(client: Any, address: str) -> None:
    """Refuse a cluster whose workers could not do the work, or would do other work.

    Raises:
        ConfigError: no workers, or other code.
    """
    try:
        client.wait_for_workers(1, timeout=WAIT_FOR_SCHEDULER_S)
    except TimeoutError:
        raise ConfigError(
            f"--cluster: nobody works for {address}; start `dask worker {address}"
            " --nthreads 1`, once for each core"
        ) from None
    for worker, digest in client.run(code_digest).items():
        if digest != code_digest():
            raise ConfigError(
                f"--cluster: worker {worker} has another moesim than this machine;"
                " install the same one on both"
            )


def _send_missing(client: Any, files: Mapping[str, Path]) -> None:
    """Copy files to workers if any of them does not have them, and to those that come
    later.
    """
    missing = {
        digest: path
        for digest, path in files.items()
        if not all(client.run(has_file, str(path), digest).values())
    }
    if missing:
        client.register_plugin(copies_of(missing))


def copies_of(files: Mapping[str, Path]) -> Any:
    """A plugin that writes files into the folder of each worker.

    Args:
        files: by digest, which is the name of the copy.
    """
    from distributed import WorkerPlugin  # noqa: PLC0415 - as above

    class Copies(WorkerPlugin):  # type: ignore[misc]
        """Files of the machine that started the sweep."""

        def __init__(self) -> None:
            self.content = {name: file.read_bytes() for name, file in files.items()}

        def setup(self, worker: Any) -> None:
            """Write them, and look for them there from now on."""
            for name, content in self.content.items():
                Path(worker.local_directory, name).write_bytes(content)
            keep_files_in(worker.local_directory)

    return Copies()


_folder: Path | None = None


def keep_files_in(folder: str | Path) -> None:
    """Look for files that are not under their path in a folder, where each is named by
    its digest.
    """
    global _folder  # noqa: PLW0603 - a worker has one folder, whatever it works on
    _folder = Path(folder)


def open_shared(path: str, digest: str) -> Trace:
    """Open the trace with a digest.

    Args:
        path: where it lies on the machine that named it.
        digest: SHA-256 of the file.

    Raises:
        TraceError: this machine does not have it.
    """
    return _opened(path, digest, _folder)


@functools.lru_cache(maxsize=16)
def _opened(path: str, digest: str, folder: Path | None) -> Trace:
    file = Path(path)
    if file.is_file() and sha256(file) == digest:
        return open_trace(file)
    if folder is not None and (folder / digest).is_file():
        return open_trace(folder / digest)
    raise TraceError(
        f"{path}: expected a file with SHA-256 {digest:.12}…, found none on this"
        " machine; has it changed since the sweep began?"
    )


def has_file(path: str, digest: str) -> bool:
    """Tell whether this machine can open a trace."""
    try:
        open_shared(path, digest)
    except TraceError:
        return False
    return True


# -- stops -----------------------------------------------------------------------------
# Keeps ctrl-C and SIGTERM away from processes that are being started.
#
# A terminal sends ctrl-C to every process of a group. An interpreter that meets it
# before it could run a line of ours prints a traceback of its own, so children begin
# their lives with both signals masked. The parent alone decides what a stop means.

STOPS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a command."""


@contextmanager
def stops_wait() -> Iterator[None]:
    """Let ctrl-C and SIGTERM wait until the block is done.

    What starts in the block inherits that they wait, threads and processes alike, and
    the start of a process is never cut in two.
    """
    arrived: list[int] = []

    def note(number: int, _frame: object) -> None:
        arrived.append(number)

    before = _replace_handlers(note)
    mask = _masked()
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


def _masked() -> set[int] | None:
    """Mask both signals in this thread; return the mask that it had."""
    # Windows has no masks; there a child ignores ctrl-C once it has started.
    if not hasattr(signal, "pthread_sigmask"):
        return None
    mask: set[int] = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    return mask


def _replace_handlers(note: Any) -> dict[int, Any]:
    """Note signals instead of handling them; return the handlers.

    The mask is that of one thread only. A signal that arrives in another thread is
    handled in the main one all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    before: dict[int, Any] = {}
    for number in STOPS:
        handler = signal.getsignal(number)
        # One that is not Python's cannot be put back, and one that ignores may stay.
        if callable(handler):
            before[number] = handler
            signal.signal(number, note)
    return before


def start_resource_trackers() -> None:
    """Start the processes in which libraries keep account of what processes share.

    Up to Python 3.12, starting the one of the standard library unmasks ctrl-C and
    SIGTERM in the thread that starts it. It must not happen while stops wait.

    They remove what an interrupted command shared, and warn of it; these are silent.
    """
    # A tenth of a second that a run in one process need not pay.
    from multiprocessing import resource_tracker  # noqa: PLC0415

    from joblib.externals.loky.backend import (  # noqa: PLC0415
        resource_tracker as joblibs,
    )

    # They inherit options of the interpreter, and warn on the terminal of a user.
    sys.warnoptions.append("ignore")
    try:
        resource_tracker.ensure_running()
        joblibs.ensure_running()
    finally:
        sys.warnoptions.remove("ignore")

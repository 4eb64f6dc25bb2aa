"""A Dask cluster as the place where tasks run.

Dask is imported here only, and only when a cluster is asked for. Its own executor is
used, not joblib's backend for it: that one waits for ever for a task whose workers die
(joblib 1.6).
"""

from __future__ import annotations

import errno
import functools
import re
import sys
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.errors import TraceError
from moesim.base.files import sha256
from moesim.base.options import ConfigError
from moesim.runs.sweeps.plan import code_digest
from moesim.traces.format.reader import Trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WAIT_FOR_SCHEDULER_S = 10
"""Seconds after which a scheduler that does not answer, or has no workers, counts as
missing.
"""

_ADDRESS = re.compile(r"(tcp|tls|ws|wss|ucx)://.+")


@contextmanager
def connected(address: str, files: Mapping[str, Path]) -> Iterator[Any]:
    """Connect to a cluster while the block runs: an executor, which runs the
    tasks of a lost worker again on another one.

    Args:
        address: of a scheduler, such as ``tcp://192.168.0.5:8786``.
        files: by digest, those that workers read; copied to those that lack them.

    Raises:
        ConfigError: it is no address, nobody answers, nobody works there, or workers
            have another moesim.
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
        _check_workers(client, address)
        _send_missing(client, files)
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
    from distributed.diagnostics.plugin import UploadFile  # noqa: PLC0415 - as above

    for digest, path in files.items():
        if not all(client.run(has_file, str(path), digest).values()):
            copy = UploadFile(path, load=False)
            # Several files may share a name.
            copy.filename = digest
            client.register_plugin(copy)


@functools.lru_cache(maxsize=16)
def open_shared(path: str, digest: str) -> Trace:
    """Open the trace with a digest: under its path, or the copy that Dask made.

    Args:
        path: where it lies on the machine that named it.
        digest: SHA-256 of the file.

    Raises:
        TraceError: this machine does not have it.
    """
    places = [Path(path)]
    if "distributed" in sys.modules:
        from distributed import get_worker  # noqa: PLC0415 - as above

        # Outside of its tasks nobody is a worker.
        with suppress(ValueError):
            places.append(Path(get_worker().local_directory, digest))
    for place in places:
        if place.is_file() and sha256(place) == digest:
            return open_trace(place)
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

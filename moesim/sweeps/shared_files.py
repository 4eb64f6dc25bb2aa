"""Files that several processes or machines read: found by path, else by digest, and
opened once in each process.
"""

from __future__ import annotations

import functools
from pathlib import Path

from moesim.traces.errors import TraceError
from moesim.traces.files import sha256
from moesim.traces.format.reader import Trace, open_trace

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
    """Whether this machine can open a trace."""
    try:
        open_shared(path, digest)
    except TraceError:
        return False
    return True

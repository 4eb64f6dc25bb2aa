"""An exclusive lock on an open file, held until the file is closed.

Locks are POSIX's, so builds of stores and recordings need Linux or macOS; the module
can be imported anywhere.
"""

from __future__ import annotations

from typing import IO


def try_lock(file: IO[str]) -> bool:
    """Take the lock of an open file; return whether no other process or file has it."""
    import fcntl  # noqa: PLC0415 - not on every system

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

"""Too little memory, said in one line: before the first library is loaded, or after one
of them failed for want of it.

Under a limit of address space (``ulimit -v``) libraries fail in ways of their own: they
cannot be loaded, cannot start threads, or end the process.
"""

import errno
import os
from pathlib import Path

MIB = 1 << 20
LEAST_BYTES = 768 * MIB
"""Address space that the smallest replay needs: with two cores 600 MiB were too little
and 800 MiB enough (Linux, pyarrow 26).
"""

BYTES_PER_CORE = 16 * MIB
"""Stack and buffers of a thread of the linear algebra library, which has one for each
core.
"""

_SIGNS = (
    "cannot allocate memory",
    "failed to map segment",
    "can't start new thread",
    "could not find/load shared object",
    "unable to allocate",
    "std::bad_alloc",
)
"""Parts of messages of libraries that had too little."""


class MemoryLimitError(MemoryError):
    """This process may have less memory than it needs."""


def limit_bytes() -> int | None:
    """Return how much address space this process may have; None without a limit."""
    try:
        import resource
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def check_limit() -> None:
    """Refuse to begin under a limit that no command fits into.

    Raises:
        MemoryLimitError: naming what is needed and what there is.
    """
    limit = limit_bytes()
    needed = LEAST_BYTES + BYTES_PER_CORE * (os.cpu_count() or 1)
    if limit is not None and limit < needed:
        raise MemoryLimitError(
            f"needs {needed // MIB} MiB of memory, has {limit // MIB} MiB; raise the"
            " limit (ulimit -v)"
        )


def is_want_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory was lacking."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()
    is_of_library = isinstance(error, ImportError | OSError | RuntimeError)
    return is_of_library and any(sign in text for sign in _SIGNS)


def message(error: BaseException) -> str:
    """One line: what the process needs at least, what there is, and a way out."""
    if isinstance(error, MemoryLimitError):
        return str(error)
    limit = limit_bytes()
    has = _available() if limit is None else f"has {limit // MIB} MiB"
    peak = _peak_bytes()
    needs = "needs more" if peak is None else f"needs more than {peak // MIB} MiB"
    return f"not enough memory: {needs}, {has}; give smaller sizes, or --steps"


def _peak_bytes() -> int | None:
    """Most address space that this process ever had."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        lines = dict(line.split(":", 1) for line in text.splitlines())
        return int(lines["VmPeak"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _available() -> str:
    try:
        import psutil

        return f"{psutil.virtual_memory().available // MIB} MiB are available"
    except (ImportError, OSError):
        return "less is available"

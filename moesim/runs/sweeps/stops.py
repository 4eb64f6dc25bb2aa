"""Keeps ctrl-C and SIGTERM away from processes that are being started.

A terminal sends ctrl-C to every process of a group. An interpreter that meets it before
it could run a line of ours prints a traceback of its own, so children begin their lives
with both signals masked. The parent alone decides what a stop means.
"""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

STOPS = (signal.SIGINT, signal.SIGTERM)
"""What ends a command."""


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

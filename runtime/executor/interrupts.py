"""When a run may be interrupted: between operations, with no lock held.

Python calls a signal's handler between any two instructions of the main thread, also
between those that take a lock and those that note who is to be woken. An exception
raised there leaves a lock held, or a sleeper that nobody wakes. So the first signal is
noted, the control thread is woken, and the program's own handler is called where
nothing is half done. A second one is handled at once, as if there were no run.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Holds signals back within its block.

    Args:
        wake: lets the control thread call `check`; called by the signal's handler, so
            it takes no lock.
    """

    __slots__ = ("_handlers", "_noted", "_wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._noted: int | None = None
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> Self:
        """Take the place of the handlers; only the main thread has any."""
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Give the handlers back, and call the one that is due."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is None:
            self.check()

    def check(self) -> None:
        """Call the handler of a signal that was noted. Hold no lock."""
        if self._noted is not None:
            number = self._noted
            self._noted = None
            self._handlers[number](number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None:
            self._handlers[number](number, frame)
        self._noted = number
        self._wake()

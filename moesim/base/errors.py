"""Ends of the program before its work is done: errors that a user can do something
about, as one line (file, place, expected, found, way out), and signals.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Final


class TraceError(ValueError):
    """A trace, or a foreign file that should become one, cannot be trusted."""


class MissingColumnError(TraceError):
    """A trace lacks an optional column that somebody reads.

    Attributes:
        column: its name.
    """

    def __init__(self, message: str, column: str) -> None:
        # Both are arguments, so that processes can send it to each other.
        super().__init__(message, column)
        self.column = column

    def __str__(self) -> str:
        """The message alone."""
        return str(self.args[0])


class AdviceError(ValueError):
    """A model file, machine, measurement or job that cannot be advised on."""


class StoreError(ValueError):
    """An expert store, or the checkpoint it is built from, cannot be trusted or cannot
    be used.
    """


# No "Error" in the name: the machine is at fault, not the input.
class RuntimeFault(RuntimeError):  # noqa: N818 - see above
    """The machine did not give what a run needs: memory, page-locking, or a disk that
    answers.
    """


# -- signals ---------------------------------------------------------------------------


INTERRUPTED: Final = 130
TERMINATED: Final = 143
"""Exit codes of a program that a signal ended."""

ENDS: Final = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}
"""Messages of an end by a signal, by exit code."""


def stopping_signals() -> list[int]:
    """Signals that end the program in an orderly way."""
    # A shell makes what it starts in the background deaf to ctrl-C; that stays so.
    is_deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return [signal.SIGTERM, *([] if is_deaf else [signal.SIGINT])]


def exit_code(number: int) -> int:
    """Exit code of a program that a signal ended."""
    return TERMINATED if number == signal.SIGTERM else INTERRUPTED


def say_end(code: int) -> None:
    """Say on standard error that a signal ended the program."""
    # The terminal may be gone, and buffers may be in use by what was interrupted.
    with suppress(OSError):
        os.write(2, f"{ENDS[code]}\n".encode())

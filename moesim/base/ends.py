"""The end of the program by a signal: its exit code, and what it says."""

import os
import signal
from contextlib import suppress
from typing import Final

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

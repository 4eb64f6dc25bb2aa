"""Where the program begins: from here on, ctrl-C and SIGTERM end it in one line.

What the command line needs takes a moment to import. Nothing has been written by then,
so the process ends at once; `moesim.cli.errors.guarded` takes over when a command
begins.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from moesim.base.errors import exit_code, say_end, stopping_signals
from moesim.base.extensions import check_links

BAD_CHECKOUT = 2
"""Exit code, as for other bad input."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; see `moesim.cli.app.main`."""
    # Before NumPy is imported: with a thread per core its import takes twice as long,
    # and nothing here multiplies matrices that are worth them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for number in stopping_signals():
        signal.signal(number, _end)
    try:
        check_links(Path(__file__).parent)
    except ImportError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(BAD_CHECKOUT)
    from moesim.cli import main as command_line  # noqa: PLC0415 - takes a moment

    command_line(arguments)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    code = exit_code(number)
    say_end(code)
    os._exit(code)

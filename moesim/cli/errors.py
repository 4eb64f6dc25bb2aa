"""What a user sees when something fails: one line and an exit code.

An interrupt ends a command in an orderly way.
"""

import errno
import io
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from moesim.base.errors import (
    ENDS,
    INTERRUPTED,
    exit_code,
    say_end,
    stopping_signals,
)
from moesim.base.text import VisibleStream, one_line

UsageError: type[Exception] = typer.BadParameter.__base__  # type: ignore[assignment]
"""What typer raises for arguments that it cannot parse; it has no public name."""

OUTPUT_CLOSED = 1
BAD_INPUT = 2
"""Exit codes; the first is typer's too, for an output that was closed as by ``|
head``. Those of signals are in `moesim.base.errors`.
"""


def guarded(
    work: Callable[[], object], arguments: Sequence[str] | None = None
) -> NoReturn:
    """Call `work` and exit with what it returns.

    Errors that a user can mend become one line on standard error.

    Args:
        work: a whole command.
        arguments: of the command line; None takes those of the process.
    """
    _prepare_streams()
    code: object = 0
    with _interruptible() as signals:
        try:
            _check_words(sys.argv[1:] if arguments is None else arguments)
            code = work()
            sys.stdout.flush()
        except SystemExit as end:
            code = end.code
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except BrokenPipeError:
            # The reader is gone, so nothing may be left to be flushed to it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = OUTPUT_CLOSED
        except Exception as error:  # noqa: BLE001 - a bug of ours is raised again
            # A library makes an error of its own of an interrupt that meets its C code.
            if not signals:
                _explain(error)
                code = BAD_INPUT
    if signals:
        code = exit_code(signals[0])
        say_end(code)
        _leave(code)
    if isinstance(code, int) and code in ENDS:
        say_end(code)
    sys.exit(code)  # type: ignore[arg-type]


def _prepare_streams() -> None:
    """Let both outputs take whatever is printed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # Closed by whoever called; files may be all that is wanted.
        if stream is None:
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, nowhere)
        # A terminal that lacks a character shows a question mark.
        elif type(stream) is io.TextIOWrapper:
            # A command works although nobody hears its notes.
            shown = VisibleStream(stream, is_lossy=name == "stderr")
            # Its buffer has moved; results are poured into the process's own stream.
            if getattr(sys, f"__{name}__") is stream:
                setattr(sys, f"__{name}__", shown)
            setattr(sys, name, shown)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Raise `KeyboardInterrupt` in the block at ctrl-C and SIGTERM alike.

    Yields the list of signals that arrived. The second one, which an impatient hand
    sends after the first, does not interrupt the clearing up; later ones raise again.
    """
    signals: list[int] = []
    # Only the main thread of a process may handle signals.
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) != 2:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in stopping_signals()}
    for number in before:
        signal.signal(number, handle)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            # All is cleared up, but the interpreter takes a moment to end: a second
            # interrupt must not kill it in that moment, which would hide the exit code.
            signal.signal(number, signal.SIG_IGN if signals else handler)


def _explain(error: Exception) -> None:
    """Print a line about what a user can mend; raise a bug of ours."""
    message = message_for_users(error)
    if message is None:
        from moesim.policies.faults import policy_fault

        error = policy_fault(error) or error
        message = message_for_users(error)
    # The lines of a user's policy that failed, and none of ours.
    print(getattr(error, "frames", ""), end="", file=sys.stderr)
    if message is None:
        raise error
    # A group without a command answers with its help, which is no error.
    is_help = message.startswith("Usage:")
    print(message if is_help else one_line(f"error: {message}"), file=sys.stderr)


def _leave(code: int) -> NoReturn:
    """End this process, which has cleared up, without waiting for libraries."""
    for stream in (sys.stdout, sys.stderr):
        # Whoever has read them may be gone.
        with suppress(OSError, ValueError):
            stream.flush()
    # The part of its exit function that frees what processes share; the rest waits for
    # processes, and may do so for ever.
    if "multiprocessing.util" in sys.modules:
        sys.modules["multiprocessing.util"]._run_finalizers(0)  # noqa: SLF001 - as said
    os._exit(code)


def _check_words(arguments: Sequence[str]) -> None:
    """Refuse an option or argument without content, which as a path would mean the
    current folder, and an option that stands twice, of which the first would be lost.

    Raises:
        typer.BadParameter: naming it.
    """
    for before, word in pairwise(("", *arguments)):
        if not word or re.fullmatch(r"--[\w-]+=", word):
            name = word[:-1] or (before if before.startswith("-") else "argument")
            raise typer.BadParameter(
                "expected something, found an empty word; leave it out, or fill it",
                param_hint=name,
            )
    flags = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    for flag, count in Counter(flags).items():
        if count > 1:
            raise typer.BadParameter(
                f"expected it once, found it {count} times; several values are"
                " separated by commas",
                param_hint=flag,
            )


def message_for_users(error: Exception) -> str | None:
    """One line about what a user can mend; None for a bug of ours."""
    if isinstance(error, UsageError):
        return _usage(error)
    if _is_want_of_memory(error):
        return "not enough memory; give smaller sizes, or --steps"
    if isinstance(error, ImportError):
        return _missing_extra(error)
    # Classes of ours are written for users, but a simulation that failed is our bug.
    module = type(error).__module__
    is_for_users = module.startswith("moesim.") and not module.startswith("moesim.sim.")
    return _one_line(error) if isinstance(error, OSError) or is_for_users else None


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        # A rename has two names, and the second is the one that users know.
        names = [name for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([*map(str, names[-1:]), error.strerror])
    return str(error)


def _usage(error: Any) -> str:
    """What cannot be parsed, and where the right words stand; a group without a command
    answers with its help.
    """
    message = str(error.format_message()).rstrip(".")
    if "\n" in message or error.ctx is None:
        return message
    return f"{message} (see: {error.ctx.command_path} --help)"


def _missing_extra(error: ImportError) -> str | None:
    extras = {
        "torch": "runtime",
        "transformers": "runtime",
        "safetensors": "runtime",
        "distributed": "cluster",
        "dask": "cluster",
        "optuna": "search",
    }
    extra = extras.get((error.name or "").partition(".")[0])
    if extra is None:
        return None
    return (
        f"this command needs {error.name}, which is not installed; pip install"
        f" 'moesim[{extra}]'"
    )


_SIGNS = (
    "cannot allocate memory",
    "failed to map segment",
    "can't start new thread",
    "could not find/load shared object",
    "unable to allocate",
    "std::bad_alloc",
)
"""Parts of messages of libraries that had too little."""


def _is_want_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory was lacking."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()
    is_of_library = isinstance(error, ImportError | OSError | RuntimeError)
    return is_of_library and any(sign in text for sign in _SIGNS)

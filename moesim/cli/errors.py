"""What a user sees when something fails: one line and an exit code.

An interrupt ends a command in an orderly way; a second one sets a deadline for that.
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

from moesim.base.ends import ENDS, INTERRUPTED, exit_code, say_end, stopping_signals
from moesim.base.files import discard_all, remove_leftovers
from moesim.base.text import VisibleStream, one_line

UsageError: type[Exception] = typer.BadParameter.__base__  # type: ignore[assignment]
"""What typer raises for arguments that it cannot parse; it has no public name."""

OUTPUT_CLOSED = 1
BAD_INPUT = 2
"""Exit codes; the first is typer's too, for an output that was closed as by ``|
head``. Those of signals are in `moesim.base.ends`.
"""

CLEANUP_LIMIT_S = 1.5
"""Seconds that a command has to clear up after an interrupt."""

END_LIMIT_S = 0.3
"""Seconds to wait for processes that were killed."""


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
            check_limit()
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
        # What began before a block could watch over it is still there.
        discard_all()
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

    Yields the list of signals that arrived. Only the first one raises, so that clearing
    up is not interrupted; from then on the process has `CLEANUP_LIMIT_S` to end, also
    where a library swallowed what was raised.
    """
    signals: list[int] = []
    # Only the main thread of a process may handle signals.
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) == 1:
            deadline = threading.Timer(CLEANUP_LIMIT_S, _give_up, [number])
            deadline.daemon = True
            deadline.start()
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


def _give_up(number: int) -> None:
    """End this process and its children at once, and remove what is unfinished."""
    import psutil

    killed = []
    folders: set[Path] = set()
    for child in psutil.Process().children(recursive=True):
        # A child may end by itself while we look at it.
        with suppress(psutil.Error):
            # It removes what its parent has shared with others, and then ends.
            if any("resource_tracker" in word for word in child.cmdline()):
                continue
            with suppress(psutil.Error):
                folders.update(Path(file.path).parent for file in child.open_files())
            child.kill()
            killed.append(child)
    discard_all()
    # Only the dead let go of what they were writing.
    psutil.wait_procs(killed, END_LIMIT_S)
    for folder in folders:
        remove_leftovers(folder)
    code = exit_code(number)
    say_end(code)
    os._exit(code)


def _explain(error: Exception) -> None:
    """Print a line about what a user can mend; raise a bug of ours."""
    message = message_for_users(error)
    if message is None:
        error = _fault_of_policy(error)
        message = message_for_users(error)
    _print_frames(error)
    if message is None:
        raise error
    # A group without a command answers with its help, which is no error.
    is_help = message.startswith("Usage:")
    print(message if is_help else one_line(f"error: {message}"), file=sys.stderr)


def _fault_of_policy(error: Exception) -> Exception:
    """The fault of a user's policy that `error` comes from, else `error` itself."""
    from moesim.policies.faults import policy_fault

    return policy_fault(error) or error


def _print_frames(error: Exception) -> None:
    """Print the lines of a user's policy that failed, and none of ours."""
    # Only policies of others have them; most errors need no more than a line.
    frames = getattr(error, "frames", None)
    if frames is not None:
        print(frames, end="", file=sys.stderr)


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
    if is_want_of_memory(error):
        return memory_message(error)
    if isinstance(error, ImportError):
        return _missing_extra(error)
    # A machine that failed us is the user's to mend; a simulation that did is ours.
    if isinstance(error, RuntimeError):
        ours = ("moesim.runtime.", "moesim.policies.faults")
        is_fault = type(error).__module__.startswith(ours)
        return _one_line(error) if is_fault else None
    if isinstance(error, OSError) or _is_for_users(error):
        return _one_line(error)
    return None


def _is_for_users(error: Exception) -> bool:
    """Whether the class of an error is ours and written for users; the simulator's own
    errors are bugs of ours.
    """
    module = type(error).__module__
    return module.startswith("moesim.") and not module.startswith("moesim.sim.")


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
    message = message.replace("Input should be", "expected")
    message = re.sub(r", unable to parse \w+ as an? \w+", "", message)
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


def memory_message(error: BaseException) -> str:
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

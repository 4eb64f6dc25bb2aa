"""The command line: parse, call one library function, print.

Results go to standard output, everything else to standard error. Bad input is one line
and exit code 2; a bug of ours is a traceback.
"""

import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from moesim import __version__
from moesim.cli import gap as cli_gap
from moesim.cli import hits as cli_hits
from moesim.cli import listing as cli_list
from moesim.cli import measure as cli_measure
from moesim.cli import quality as cli_quality
from moesim.cli import replay as cli_replay
from moesim.cli import reproduce as cli_reproduce
from moesim.cli import run as cli_run
from moesim.cli import trace as cli_trace
from moesim.cli import trace_more as cli_trace_more
from moesim.cli import train_cache as cli_learn
from moesim.cli import validate as cli_validate

UsageError: type[Exception] = typer.BadParameter.__base__  # type: ignore[assignment]
"""What typer raises for words that it cannot read; it has no public name."""
NOBODY_READS = 1
BAD_INPUT = 2
INTERRUPTED = 130
TERMINATED = 143
"""Exit codes; the first is typer's too, for an output that was closed as by ``|
head``.
"""

app = typer.Typer(
    name="moesim",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help=(
        "Which expert should be where, when, computed by whom: replay"
        " Mixture-of-Experts routing traces on a model of a PC."
    ),
    epilog=(
        "Start with: moesim replay TRACE --policy greedy, or make demo in a checkout."
    ),
)
COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "replay": (cli_replay.replay, "Replay a trace through a policy on a machine."),
    "compare": (cli_replay.compare, "Replay one trace under several policies."),
    "list": (cli_list.list_, "List policies, systems, machines, models."),
    "record": (cli_measure.record, "Run a model and write its routing trace."),
    "profile": (cli_measure.profile, "Measure this PC."),
    "train-tiny": (cli_measure.train_tiny, "Train the small model that ships."),
}
for _name, (_function, _short_help) in COMMANDS.items():
    app.command(_name, short_help=_short_help)(_function)
for _room in (
    cli_hits,
    cli_run,
    cli_validate,
    cli_gap,
    cli_quality,
    cli_reproduce,
    cli_learn,
):
    _room.add_commands(app)
cli_trace_more.add_commands(cli_trace.app)
app.add_typer(
    cli_trace.app,
    name="trace",
    short_help="Look into traces, or make them of foreign files.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moesim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    del version


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 2 bad input, 130 interrupted, 143
    terminated.

    Args:
        arguments: without the program's name; None takes those of the process.
    """
    words = None if arguments is None else list(arguments)
    guarded(lambda: app(args=words, prog_name="moesim", standalone_mode=False), words)


def _refuse_empty(words: Sequence[str]) -> None:
    """Refuse an option or argument without content: as a path it would mean the current
    folder.

    Raises:
        typer.BadParameter: naming it.
    """
    for before, word in pairwise(("", *words)):
        if not word or re.fullmatch(r"--[\w-]+=", word):
            name = word[:-1] or (before if before.startswith("-") else "argument")
            raise typer.BadParameter(
                "expected something, found an empty word; leave it out, or fill it",
                param_hint=name,
            )


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """Let SIGTERM do in the block what ctrl-C does, and yield a list that holds it
    afterwards.

    Only the first thread of a process may ask for that; elsewhere nothing changes.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        asked.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


def guarded(
    work: Callable[[], object], arguments: Sequence[str] | None = None
) -> NoReturn:
    """Do `work` and exit with what it returns; what a user can mend becomes one line on
    standard error.

    Args:
        work: to be done.
        arguments: words that asked for it; None takes those of the process.
    """
    code: object = 0
    # A terminal that lacks a character shows a question mark.
    for stream in (
        sys.stdout,
        sys.stderr,
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    with _terminable() as terminated:
        try:
            _refuse_empty(sys.argv[1:] if arguments is None else arguments)
            code = work()
            sys.stdout.flush()
        except SystemExit as end:
            code = end.code
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except BrokenPipeError:
            # So that nothing is left to be flushed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = NOBODY_READS
        except (
            UsageError,
            ValueError,
            OSError,
            ImportError,
            RuntimeError,
            MemoryError,
        ) as error:
            message = _for_users(error)
            if message is None:
                raise
            print(
                message if message.startswith("Usage:") else f"error: {message}",
                file=sys.stderr,
            )
            code = BAD_INPUT
    if terminated:
        code = TERMINATED
    sys.exit(code)  # type: ignore[arg-type]


def _for_users(error: Exception) -> str | None:
    """Say in one line what a user can mend, or None for a bug of ours."""
    if isinstance(error, UsageError):
        return _usage(error)
    if isinstance(error, MemoryError):
        return "not enough memory on this machine; give smaller sizes, or --steps"
    if isinstance(error, ImportError):
        return _missing_extra(error)
    # A machine that failed us is the user's to mend; a simulation that did is ours.
    if isinstance(error, RuntimeError):
        return (
            _one_line(error)
            if type(error).__module__.startswith("moesim.runtime.")
            else None
        )
    ours = isinstance(error, OSError) or _is_for_users(error)
    return _one_line(error) if ours else None


def _is_for_users(error: Exception) -> bool:
    """Whether the class of an error is ours and written for users; the simulator's own
    errors are bugs of ours.
    """
    module = type(error).__module__
    return module.startswith("moesim.") and not module.startswith("moesim.sim.")


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        places = [
            str(name) for name in (error.filename, error.filename2) if name is not None
        ]
        return ": ".join([*places[-1:], error.strerror])
    return " ".join(str(error).split())


def _usage(error: Any) -> str:
    """What cannot be read, and where the right words stand; a group without a command
    answers with its help.
    """
    message = str(error.format_message()).rstrip(".")
    if "\n" in message or error.ctx is None:
        return message
    return f"{message} (see: {error.ctx.command_path} --help)"


def _missing_extra(error: ImportError) -> str | None:
    extras = {"torch": "runtime", "transformers": "runtime", "safetensors": "runtime"}
    extra = extras.get((error.name or "").partition(".")[0])
    if extra is None:
        return None
    return (
        f"this command needs {error.name}, which is not installed; pip install"
        f" 'moesim[{extra}]'"
    )

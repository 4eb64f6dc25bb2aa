"""The command line: parse, call one library function, print.

Results go to standard output, everything else to standard error. Bad input is one line and exit code 2; a bug of
ours is a traceback.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, NoReturn

import typer

from moesim import (
    __version__,
    cli_gap,
    cli_learn,
    cli_list,
    cli_measure,
    cli_quality,
    cli_replay,
    cli_reproduce,
    cli_run,
    cli_trace,
    cli_trace_more,
    cli_validate,
)

OURS = ("moesim", "traces", "hwprofiles", "policies", "runtime")
"""Packages whose own kinds of `ValueError` are written for users."""

app = typer.Typer(
    name="moesim",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help=(
        "Which expert should be where, when, computed by whom: replay Mixture-of-Experts routing traces on a model of"
        " a PC."
    ),
    epilog="Start with: moesim replay TRACE --policy greedy, or make demo in a checkout.",
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
for _room in (cli_run, cli_validate, cli_gap, cli_quality, cli_reproduce, cli_learn):
    _room.add_commands(app)
cli_trace_more.add_commands(cli_trace.app)
app.add_typer(cli_trace.app, name="trace", short_help="Look into traces, or make them of foreign files.")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moesim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    del version


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 2 bad input, 130 interrupted.

    Args:
        arguments: without the program's name; None takes those of the process.
    """
    guarded(lambda: app(args=None if arguments is None else list(arguments), prog_name="moesim"))


def guarded(work: Callable[[], object]) -> NoReturn:
    """Do `work` and exit; what a user can mend becomes one line on standard error."""
    code: object = 0
    try:
        work()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 130
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        message = _for_users(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        code = 2
    sys.exit(code)  # type: ignore[arg-type]


def _for_users(error: ValueError | OSError | ImportError | RuntimeError) -> str | None:
    """Say in one line what a user can mend, or None for a bug of ours."""
    if isinstance(error, ImportError):
        return _missing_extra(error)
    if isinstance(error, RuntimeError):  # a machine that failed us is the user's to mend; a simulation that did is ours
        return " ".join(str(error).split()) if type(error).__module__.startswith("runtime.") else None
    if isinstance(error, OSError) and error.strerror:
        places = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([*places[-1:], error.strerror])
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in OURS:
        return " ".join(str(error).split())
    return None


def _missing_extra(error: ImportError) -> str | None:
    extras = {"torch": "runtime", "transformers": "runtime", "safetensors": "runtime"}
    extra = extras.get((error.name or "").partition(".")[0])
    if extra is None:
        return None
    return f"this command needs {error.name}, which is not installed; pip install 'moesim[{extra}]'"

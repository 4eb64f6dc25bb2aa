"""All commands of the command line, and its entry point.

Results go to standard output, everything else to standard error. Bad input is one line
and exit code 2; a bug of ours is a traceback.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from moesim.base.version import __version__
from moesim.cli.errors import guarded
from moesim.cli.output import COMMAND_WORDS, print_notes

GROUPS = {
    "Begin here": {
        "replay": ("runs:replay", "Replay a trace through a policy on a machine."),
        "compare": ("questions:compare", "Replay one trace under several policies."),
        "advise": ("advise:advise", "Say which llama.cpp flags are fastest here."),
        "list": ("listing:list_", "List policies, systems, machines, models."),
        "config": ("listing:config", "Print a configuration file to start from."),
    },
    "Simulate": {
        "sweep": ("sweeps:sweep", "Replay every combination of any options."),
        "search": ("sweeps:search", "Search for the best policy, memory and machine."),
        "results": ("sweeps:results", "Ask questions of the results of sweeps."),
        "hits": ("questions:hits", "Hit rates of caches at several sizes."),
    },
    "Explain": {
        "gap": ("questions:gap", "Say where a policy loses its time."),
        "sensitivity": (
            "questions:sensitivity",
            "Say which constant decides who wins.",
        ),
        "quality": (
            "questions:quality",
            "Measure what a policy does to a model's answers.",
        ),
    },
    "Routing and models": {
        "trace": ("trace:app", "Look into traces, or make them of foreign files."),
        "record": ("record:record", "Run a model and write its routing trace."),
        "model": ("advise:model", "Print what a model file holds, by layer."),
        "train-cache": (
            "train:train_cache",
            "Train a learned cache policy on a trace.",
        ),
    },
    "This machine": {
        "doctor": ("machine:doctor", "Say what of this PC works."),
        "profile": ("machine:profile", "Measure this PC."),
        "verify": ("machine:verify", "Say whether the simulator holds on this PC."),
        "calibrate": ("machine:calibrate", "Learn this PC's costs from runs."),
        "run": ("runs:run", "Run real experts on this machine."),
        "validate": ("machine:validate", "Compare simulated with measured runs."),
    },
    "Research": {
        "reproduce": ("reproduce:reproduce", "Published figures beside ours.")
    },
}
"""Title -> commands, as ``moesim --help`` shows them: name -> module and function, and
a line of help; ``app`` is that of commands which have commands of their own.
"""

COMMANDS = {name: place for group in GROUPS.values() for name, place in group.items()}


LISTED = ("policies", "systems", "hardware", "machines", "models", "traces")
"""Words that newcomers take for commands."""


class _Commands(TyperGroup):
    """All commands. They are many and help needs none, so each is imported when it is
    called.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (place, short_help) in COMMANDS.items():
            module, _, function = place.partition(":")
            command = DeferredCommand(
                name,
                short_help=short_help,
                module=f"moesim.cli.commands.{module}",
                function=function,
            )
            self.add_command(command)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Show commands in groups, those for a beginning first."""
        del ctx
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name, text) for name, (_, text) in commands.items()]
                )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; what `list` lists is no command, and leads there."""
        if args and args[0] in LISTED:
            raise typer.BadParameter(
                f"expected a command, got {args[0]!r}; did you mean `moesim list`?",
                ctx=ctx,
                param_hint="COMMAND",
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="moesim",
    cls=_Commands,
    no_args_is_help=True,
    # Brackets in help are text, and a traceback is for a bug report.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help=(
        "Which expert should be where, when, computed by whom: replay"
        " Mixture-of-Experts routing traces on a model of a PC."
    ),
    epilog=("Begin with: moesim replay tiny, or make demo in a checkout."),
)


def _print_version(is_given: bool) -> None:
    # Typer calls it without the option too.
    if is_given:
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
    given = None if arguments is None else list(arguments)
    COMMAND_WORDS.set(sys.argv[1:] if given is None else given)
    # A line of our source says nothing to users.
    warnings.showwarning = lambda message, *_, **__: print_notes([str(message)])
    # Alone, typer would print errors and exit itself.
    guarded(lambda: app(args=given, prog_name="moesim", standalone_mode=False), given)


class DeferredCommand(TyperCommand):
    """A command, or a group of commands, by the place where it stands.

    Args:
        name: word that calls it.
        short_help: line of the help that lists it.
        module: to import.
        function: its name in the module; a `typer.Typer` is a group.
    """

    def __init__(
        self, name: str, *, short_help: str, module: str, function: str
    ) -> None:
        super().__init__(name, short_help=short_help, rich_markup_mode=None)
        self.module = module
        self.function = function

    def make_context(self, *words: Any, **settings: Any) -> Any:
        """Parse its arguments, as the command itself, which the context then names."""
        return self.command().make_context(*words, **settings)

    def command(self) -> Any:
        """Import the command itself."""
        function = getattr(import_module(self.module), self.function)
        if isinstance(function, typer.Typer):
            return get_group(function)

        # Typer makes commands for applications only.
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(self.name)(function)
        return get_command(app)

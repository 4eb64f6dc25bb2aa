"""All commands of the command line, and its entry point.

Results go to standard output, everything else to standard error. Bad input is one line
and exit code 2; a bug of ours is a traceback.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from moesim.cli.deferred import DeferredCommand
from moesim.cli.errors import guarded
from moesim.cli.output import COMMAND_WORDS
from moesim.version import __version__

# The first ones are what a newcomer needs; help shows them in this order.
COMMANDS = {
    "replay": ("replay:replay", "Replay a trace through a policy on a machine."),
    "compare": ("compare:compare", "Replay one trace under several policies."),
    "sweep": ("sweeps.sweep:sweep", "Replay every combination of any options."),
    "results": ("sweeps.results:results", "Ask questions of the results of sweeps."),
    "search": (
        "sweeps.search:search",
        "Search for the best policy, memory and machine.",
    ),
    "advise": ("advice.advise:advise", "Say which llama.cpp flags are fastest here."),
    "model": ("advice.model:model", "Print what a model file holds, by layer."),
    "list": ("listing:list_", "List policies, systems, machines, models."),
    "config": ("config:config", "Print a configuration file to start from."),
    "record": ("record:record", "Run a model and write its routing trace."),
    "doctor": ("machine.doctor:doctor", "Say what of this PC works."),
    "profile": ("machine.profile:profile", "Measure this PC."),
    "train-tiny": ("train:train_tiny", "Train the small model that ships."),
    "hits": ("hits:hits", "Hit rates of caches at several sizes."),
    "run": ("run:run", "Run real experts on this machine."),
    "calibrate": ("calibrate:calibrate", "Learn this PC's costs from runs."),
    "validate": ("validate:validate", "Compare simulated with measured runs."),
    "sensitivity": ("sensitivity:sensitivity", "Say which constant decides who wins."),
    "gap": ("gap:gap", "Say where a policy loses its time."),
    "quality": ("quality:quality", "Measure what a policy does to a model's answers."),
    "reproduce": ("reproduce:reproduce", "Published figures beside ours."),
    "train-cache": ("train:train_cache", "Train a learned cache policy on a trace."),
    "store": ("store:app", "Build expert stores."),
    "trace": ("trace:app", "Look into traces, or make them of foreign files."),
}
"""Name -> module and function, and the line that ``moesim --help`` shows; ``app`` is
that of commands which have commands of their own.
"""


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
    epilog=(
        "Start with: moesim replay TRACE --policy greedy, or make demo in a checkout."
    ),
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
    # Alone, typer would print errors and exit itself.
    guarded(lambda: app(args=given, prog_name="moesim", standalone_mode=False), given)

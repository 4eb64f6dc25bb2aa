"""A command of the command line whose module is imported when it is called."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command, get_group


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

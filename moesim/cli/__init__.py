"""The command line: parse, call one library function, print."""

from moesim.cli.app import app, main
from moesim.cli.errors import guarded

__all__ = ["app", "guarded", "main"]

"""Lines that many commands print when they are done."""

from __future__ import annotations

import shlex
import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from moesim.runs.config import RunConfig

COMMAND_WORDS: ContextVar[Sequence[str]] = ContextVar("COMMAND_WORDS", default=())
"""The command line of this process behind the program's name."""


def command_line() -> str:
    """The command line as one types it, for the heads of pages."""
    return shlex.join(["moesim", *COMMAND_WORDS.get()])


def print_written(places: Iterable[Path | None]) -> None:
    """Name the files and folders that were written; None was not asked for."""
    for place in places:
        # Callers list all that could be written.
        if place is not None:
            print(f"wrote {place}")


def print_notes(warnings: Iterable[str]) -> None:
    """Print warnings on standard error, so that they are no results."""
    for warning in warnings:
        print(f"note: {warning}", file=sys.stderr)


def bound_json(config: RunConfig, makespan_s: float) -> dict[str, Any]:
    """What `print_bound` prints, as the part of a JSON object: ``bound``, None where
    there is none.
    """
    from moesim.bound.of_replay import bound_of

    bound = bound_of(config)
    if bound is None:
        return {"bound": None}
    return {"bound": bound.to_json() | {"share": bound.share(makespan_s)}}


def print_bound(config: RunConfig, makespan_s: float, lead: str = "") -> None:
    """Print how far a run is from the physical bound, where there is one.

    Args:
        config: of the run.
        makespan_s: that it took.
        lead: words in front, such as whose run it is.
    """
    # It walks through the trace, so commands that print no bound do not load it.
    from moesim.bound.of_replay import bound_of

    bound = bound_of(config)
    if bound is not None:
        print(f"bound: {lead}{bound.words(makespan_s)}")

"""What many commands print: progress while they work, and lines when they are done."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from moesim.base.text import one_line, visible
from moesim.base.units import percent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from moesim.base.options import JsonOptions, Options
    from moesim.reporting.answers import Answer


LONGEST_NOTE = 600
"""Letters of a note."""

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
            print(f"wrote {visible(str(place))}")


def print_notes(warnings: Iterable[str]) -> None:
    """Print warnings on standard error, so that they are no results."""
    for warning in warnings:
        print(one_line(f"note: {warning}", LONGEST_NOTE), file=sys.stderr)


def present(
    answer: Answer,
    options: Options,
    *,
    more: Iterable[Path | None] = (),
    notes: Iterable[str] = (),
) -> None:
    """Write and print an answer.

    Args:
        answer: what was asked, and what came out.
        options: of the command; `as_json`, `png`, `html` and `table` say where it goes.
        more: other files that were written.
        notes: for standard error, beside the answer's warnings.
    """
    answer.command = command_line()
    png, html, table = (
        getattr(options, name, None) for name in ("png", "html", "table")
    )
    if png is not None:
        # No window opens, so that no backend need be known.
        os.environ.pop("MPLBACKEND", None)
        answer.figure().save(png)
    if html is not None:
        answer.write(html)
    if table is not None:
        from moesim.reporting.tables import save_table

        save_table(answer.frame, table)
    if getattr(options, "as_json", False):
        print(json.dumps(answer.to_json(), indent=2))
        return
    print(answer.text())
    print_written([*more, png, html, table])
    # Runs share most of their warnings; each is worth one line.
    print_notes(dict.fromkeys([*notes, *answer.warnings]))


def tell(
    options: JsonOptions,
    facts: Any,
    lines: Iterable[str],
    *written: Path | None,
    notes: Iterable[str] = (),
) -> None:
    """Print facts as JSON where that is asked for, else lines, what was written, and
    notes.
    """
    if options.as_json:
        print(json.dumps(facts, indent=2))
        return
    print("\n".join(lines))
    print_written(written)
    print_notes(notes)


def quiet_libraries() -> None:
    """Turn off the progress bars of libraries that load models; call it before they are
    imported.
    """
    # A user who set it wins.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


class PlainProgress:
    """Lines about long work where there is no terminal: at most one in 30 s, and none
    about what is shorter.

    Args:
        label: begins each line.
        clock_s: tells the time; injected by tests.
    """

    EVERY_S = 30.0

    def __init__(
        self, label: str, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._label = label
        self._clock_s = clock_s
        self._begin_s = self._last_s = clock_s()

    def show(self, done: float, total: float | None) -> None:
        """Print a line if one is due."""
        now_s = self._clock_s()
        if now_s - self._last_s < self.EVERY_S:
            return
        self._last_s = now_s
        words = f"{self._label}: {done:g} done"
        if total:
            share = min(done / total, 1.0)
            words = f"{self._label}: {percent(share, 0)}"
        # Of the first steps nothing can be foretold.
        if total and share >= _FORETOLD:
            left_s = (now_s - self._begin_s) * (1.0 - share) / share
            words += f", about {_duration(left_s)} left"
        print(words, file=sys.stderr, flush=True)


_FORETOLD = 0.05


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


@contextmanager
def bar(label: str, total: float | None = None) -> Iterator[Callable[..., None]]:
    """Show a bar while the block runs; yield a function to call with the work done so
    far, also behind the name of the part that runs.

    Args:
        label: stands beside the bar.
        total: the whole work; None if it is unknown.
    """
    with bars(label) as (show,):
        show(0, total)
        yield lambda *done: show(done[-1], total)


@contextmanager
def bars(*labels: str) -> Iterator[list[Callable[[float, float | None], None]]]:
    """Show several bars while the block runs, each from its first update on.

    Args:
        labels: one for each bar.

    Yields:
        For each bar a function to call with the work done so far and the whole work.
    """
    if not sys.stderr.isatty():
        yield [PlainProgress(label).show for label in labels]
        return

    # A fifth of a second that commands without a terminal need not pay.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    # A bar disappears when it is done: only results stay on the screen.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks = [progress.add_task(each, total=None, visible=False) for each in labels]
        yield [partial(_update, progress, task) for task in tasks]


def _update(progress: Any, task: Any, done: float, total: float | None) -> None:
    progress.update(task, completed=done, total=total, visible=True)

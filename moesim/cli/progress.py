"""Progress bars for people; silence for files, pipes and tests.

A bar appears on standard error, and only if that is a terminal, so standard output
stays clean for results.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import Trace


def only_ours() -> None:
    """Ask the libraries that load models for no bars of their own; call it before they
    are imported.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def bar(what: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Show a bar while the block runs; yield a function that is told how much is done
    so far.

    Args:
        what: said beside the bar.
        total: how much there is to do; None where nobody knows.
    """
    with bars(what) as (show,):
        show(0, total)
        yield lambda done: show(done, total)


@contextmanager
def bars(*whats: str) -> Iterator[list[Callable[[float, float | None], None]]]:
    """Show several bars while the block runs, each from the moment it is first told
    something.

    Args:
        whats: said beside each.

    Yields:
        For each a function that is told how much is done so far, and how much there is
        to do.
    """
    if not sys.stderr.isatty():
        yield [lambda _done, _total: None for _ in whats]
        return
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
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks = [progress.add_task(what, total=None, visible=False) for what in whats]
        yield [partial(_update, progress, task) for task in tasks]


def _update(progress: Any, task: Any, done: float, total: float | None) -> None:
    progress.update(task, completed=done, total=total, visible=True)


@contextmanager
def messages(what: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done while the block runs, as a spinner with a changing
    text.
    """
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield lambda text: status.update(f"{what}: {text}")


@contextmanager
def replaying(
    what: str, trace: Trace, steps: int | None
) -> Iterator[Callable[[RoutedStep], None]]:
    """Show the progress of a replay; yield what `replay` takes as `progress`.

    With `steps` the bar counts forward passes, otherwise tokens at layers, of which the
    trace has one per row.
    """
    done = 0

    with bar(what, steps or trace.rows) as show:

        def after(step: RoutedStep) -> None:
            nonlocal done
            done += 1 if steps else step.tokens * trace.shape.layers
            show(done)

        yield after

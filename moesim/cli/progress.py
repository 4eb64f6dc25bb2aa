"""Progress bars for people, and none for files, pipes and tests.

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


def quiet_libraries() -> None:
    """Turn off the progress bars of libraries that load models; call it before they are
    imported.
    """
    # A user who set it wins.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def bar(label: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Show a bar while the block runs; yield a function to call with the work done so
    far.

    Args:
        label: stands beside the bar.
        total: the whole work; None if it is unknown.
    """
    with bars(label) as (show,):
        show(0, total)
        yield lambda done: show(done, total)


@contextmanager
def bars(*labels: str) -> Iterator[list[Callable[[float, float | None], None]]]:
    """Show several bars while the block runs, each from its first update on.

    Args:
        labels: one for each bar.

    Yields:
        For each bar a function to call with the work done so far and the whole work.
    """
    if not sys.stderr.isatty():
        yield [lambda _done, _total: None for _ in labels]
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


@contextmanager
def messages(label: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner while the block runs; yield a function that sets the text beside
    it.
    """
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(label) as status:
        yield lambda text: status.update(f"{label}: {text}")


@contextmanager
def steps_of(label: str) -> Iterator[Callable[[str, float], None]]:
    """Show a bar that fills to one; yield a function to call with the name of the part
    that runs and the share that is done.
    """
    with bar(label, 1.0) as show:
        yield lambda _part, done: show(done)


@contextmanager
def replaying(
    label: str, trace: Trace, steps: int | None
) -> Iterator[Callable[[RoutedStep], None]]:
    """Show the progress of a replay; yield what `replay` takes as `progress`.

    With `steps` the bar counts forward passes, otherwise tokens at layers, of which the
    trace has one per row.
    """
    done = 0

    with bar(label, steps or trace.rows) as show:

        def after(step: RoutedStep) -> None:
            nonlocal done
            # How many steps a trace has is known only after composing it.
            done += 1 if steps else step.tokens * trace.shape.layers
            show(done)

        yield after

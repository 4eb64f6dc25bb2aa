"""Machine code made before anybody waits for it."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import threading
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

from moesim.machine_code import functions
from moesim.machine_code.library import load, missing, say_nothing

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES = (
    "moesim.sim",
    "moesim.policies",
    "moesim.traces",
    "moesim.runs.bound",
)
"""Where functions are that can be compiled."""


def compile_ahead(
    processes: int, progress: Callable[[float], None] | None = None
) -> int:
    """Make what is not on disk, where it stays.

    Args:
        processes: that work at once.
        progress: called with the share that is done.

    Returns:
        How many functions were made.
    """
    for name in PACKAGES:
        place = importlib.import_module(name)
        # A module has no further ones below it.
        below = getattr(place, "__path__", ())
        for module in pkgutil.walk_packages(below, f"{name}."):
            importlib.import_module(module.name)
    # Names, because functions of one process are none of another's.
    names = [
        (function.python.__module__, function.__name__)
        for function in missing(functions.MARKED)
    ]
    with ProcessPoolExecutor(processes, initializer=_end_with_parent) as pool:
        for done, _ in enumerate(pool.map(_make, names, chunksize=2), start=1):
            if progress is not None:
                progress(done / len(names))
    return len(names)


def _end_with_parent() -> None:
    """A worker holds both ends of the pipe that it waits at, so that it would outlive a
    parent that was killed, for ever.
    """

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _make(place: tuple[str, str]) -> None:
    say_nothing()
    module, name = place
    load([getattr(importlib.import_module(module), name)])

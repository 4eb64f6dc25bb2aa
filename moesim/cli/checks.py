"""Checks before a long command begins: devices, and places for results."""

import errno
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from moesim.base.files import destination, is_stream
from moesim.base.options import option


def device_option() -> Any:
    """``--device``, where a model computes."""
    text = "Where the model computes: cpu or cuda."
    pattern = (r"cpu|cuda(:\d+)?", "cpu or cuda")
    return option("cpu", text, metavar="NAME", pattern=pattern)


def check_device(device: str) -> None:
    """Refuse, before a model is loaded, a device that this machine does not have.

    Raises:
        typer.BadParameter: naming it.
    """
    # Every machine has one, and importing torch takes seconds.
    if device == "cpu":
        return
    from moesim.runtime.accelerators import accelerator_here

    accelerator = accelerator_here()
    if accelerator is None or accelerator.type != device.partition(":")[0]:
        raise typer.BadParameter(
            f"torch finds no {device!r} on this machine", param_hint="--device"
        )


def check_places(
    *,
    folder: Path | None = None,
    folders: Iterable[Path] = (),
    files: Iterable[Path | None] = (),
    inputs: Iterable[object] = (),
) -> None:
    """Refuse, before a long run and not after it, a result that has nowhere to go or
    would destroy something.

    Args:
        folder, folders: results go there, each with a name of its own.
        files: each is a result.
        inputs: files and folders that are read; no result replaces one of them or goes
            into one. What is no path, such as an opened trace, is skipped.

    Raises:
        OSError: naming the place.
    """
    read = [Path(place) for place in inputs if isinstance(place, str | Path)]
    written: list[Path] = []
    results = [(each, True) for each in folders]
    results += [] if folder is None else [(folder, True)]
    results += [(file, False) for file in files if file is not None]
    for place, is_folder in results:
        target = destination(place)
        for other in read:
            if _is_within(target, other, is_folder=is_folder):
                raise _taken(place, "what is read")
        if any(_is_same(target, other) for other in written):
            raise _taken(place, "another result")
        written.append(target)
        if not is_stream(place):
            _check_writable(target, is_file=not is_folder)


def _is_within(target: Path, read: Path, *, is_folder: bool) -> bool:
    """Whether a result would replace what is read, or go into a folder that is read."""
    if _is_same(target, read):
        # Results stand beside others in a folder, each with a name of its own.
        return not is_folder
    return read.is_dir() and Path(os.path.realpath(read)) in target.parents


def _is_same(target: Path, other: Path) -> bool:
    """Whether two paths mean one file: by name, over links, or by its inode."""
    if target == Path(os.path.realpath(other)):
        return True
    try:
        return target.samefile(other)
    except OSError:
        return False


def _taken(place: Path, victim: str) -> OSError:
    return OSError(
        errno.EEXIST,
        f"it would replace {victim}; choose another place",
        str(place),
    )


def _check_writable(place: Path, *, is_file: bool) -> None:
    # Opening it would say so only after the run.
    if is_file and place.is_dir():
        raise OSError(
            errno.EISDIR, "expected a place for a file, found a folder", str(place)
        )
    # Folders on the way are made later, so the nearest that is there decides.
    nearest = next(path for path in (place, *place.absolute().parents) if path.exists())
    if not (nearest.is_dir() or (nearest == place and is_file)):
        raise OSError(errno.ENOTDIR, "expected a folder, found a file", str(nearest))
    if not os.access(nearest, os.W_OK):
        raise OSError(errno.EACCES, "not writable; choose another place", str(nearest))


def check_installed(library: str) -> None:
    """Check that a library is there, without importing it.

    Raises:
        ImportError: it is not.
    """
    try:
        is_there = importlib.util.find_spec(library) is not None
    except ImportError:
        is_there = False
    if not is_there:
        raise ImportError(f"no module {library}", name=library)

"""Checks before a long command begins: devices, and places for results."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import typer


def refuse_options(
    context: typer.Context, names: Iterable[str], meant_for: str
) -> None:
    """Refuse options that were given although they mean nothing here.

    Raises:
        typer.BadParameter: naming one of them.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"it is meant for {meant_for}", param_hint=f"--{name.replace('_', '-')}"
            )


def check_device(device: str) -> None:
    """Refuse, before a model is loaded, a device that this machine does not have.

    Raises:
        typer.BadParameter: naming it.
    """
    # Every machine has one, and importing torch takes seconds.
    if device == "cpu":
        return
    from moesim.runtime.accelerators.here import accelerator_here

    accelerator = accelerator_here()
    if accelerator is None or accelerator.type != device.partition(":")[0]:
        raise typer.BadParameter(
            f"torch finds no {device!r} on this machine", param_hint="--device"
        )


def check_places(
    *,
    folder: Path | None = None,
    files: Iterable[Path | None] = (),
    inputs: Iterable[object] = (),
) -> None:
    """Refuse, before a long run and not after it, a result that has nowhere to go or
    would destroy something.

    Args:
        folder: results go there, each with a name of its own.
        files: each is a result.
        inputs: files that are read; no result replaces one of them. What is no path,
            such as an opened trace, is skipped.

    Raises:
        OSError: naming the place.
    """
    taken = {
        Path(place).resolve(): "what is read"
        for place in inputs
        if isinstance(place, str | Path)
    }
    if folder is not None:
        _check_writable(folder, is_file=False)
        taken[folder.resolve()] = "another result"
    for file in files:
        if file is None:
            continue
        # Resolved, since one file may be written in many ways.
        if victim := taken.get(file.resolve()):
            raise OSError(
                errno.EEXIST,
                f"it would replace {victim}; choose another place",
                str(file),
            )
        taken[file.resolve()] = "another result"
        # Opening it would say so only after the run.
        if file.is_dir():
            raise OSError(
                errno.EISDIR, "expected a place for a file, found a folder", str(file)
            )
        _check_writable(file, is_file=True)


def _check_writable(place: Path, *, is_file: bool) -> None:
    # Folders on the way are made later, so the nearest that is there decides.
    nearest = next(path for path in (place, *place.absolute().parents) if path.exists())
    if not (nearest.is_dir() or (nearest == place and is_file)):
        raise OSError(errno.ENOTDIR, "expected a folder, found a file", str(nearest))
    if not os.access(nearest, os.W_OK):
        raise OSError(errno.EACCES, "not writable; choose another place", str(nearest))

"""Calibration artefacts: tensor files that policies ask for by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.policies.base import PolicyError

if TYPE_CHECKING:
    import numpy as np

SUFFIXES = (".npy", ".npz", ".safetensors")
TENSORS = (
    "activation_counts",
    "activation_matrices",
    "prefetch_accuracy",
    "residual",
    "sensitivity",
    "single_share",
    "transitions",
)
"""Tensors that policies know by their own names, whatever file they lie in (`moesim
record --calibration`).
"""


def load_artefacts(place: str | Path | None) -> dict[str, Any]:
    """Read every tensor file of a folder, or one tensor file; nothing for None.

    Returns:
        Name without suffix -> the array of a ``.npy``, the named arrays of an ``.npz``
        or ``.safetensors``: what policies see as `RunContext.extras`. Arrays named as
        in `TENSORS` are there under their own names as well.

    Raises:
        PolicyError: no such path, no tensor file in it, or two files with the same
            tensor of `TENSORS`.
        TraceError: a damaged file.
    """
    if place is None:
        return {}
    place = Path(place)
    if not (place.is_dir() or (place.is_file() and place.suffix in SUFFIXES)):
        raise PolicyError(
            f"--artefacts {place}: no such folder; `moesim train-cache TRACE --out"
            f" {place}` makes one"
        )

    artefacts: dict[str, Any] = {}
    origin: dict[str, Path] = {}
    # Sorted, so that the same folder gives the same order on every file system.
    paths = sorted(place.iterdir()) if place.is_dir() else [place]
    for path in paths:
        if path.suffix not in SUFFIXES:
            continue
        for name, content in _named(path).items():
            # A policy asks by name, so two answers would be one too many.
            if name in TENSORS and name in origin:
                raise PolicyError(
                    f"--artefacts {place}: {name}: expected one file with it, found"
                    f" {origin[name].name} and {path.name}; keep one of them"
                )
            origin[name] = path
            artefacts[name] = content
    if not artefacts:
        raise PolicyError(
            f"--artefacts {place}: expected files {', '.join(SUFFIXES)}, found none; is"
            " it the right folder?"
        )
    return artefacts


def _named(path: Path) -> dict[str, np.ndarray | dict[str, np.ndarray]]:
    """What one file contributes: its content under its name, and known tensors."""
    # Readers of all formats bring machine code, which few runs need.
    from moesim.traces.importers.readers.tensors import (  # noqa: PLC0415 - see above
        load_named,
    )

    arrays = load_named(path)
    if path.suffix == ".npy":
        return {path.stem: arrays[""]}
    # Files of calibrations hold many tensors, and policies ask for single ones.
    known = {name: arrays[name] for name in TENSORS if name in arrays}
    return {path.stem: arrays, **known}

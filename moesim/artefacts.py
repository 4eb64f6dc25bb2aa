"""Calibration artefacts: a folder of tensor files that policies ask for by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.base import PolicyError
from traces.tensors import load_named

if TYPE_CHECKING:
    import numpy as np

SUFFIXES = (".npy", ".npz", ".safetensors")


def load_artefacts(folder: str | Path | None) -> dict[str, Any]:
    """Read every tensor file of a folder; nothing without a folder.

    Returns:
        Name without suffix -> the array of a ``.npy``, the named arrays of an ``.npz`` or ``.safetensors``: what
        policies see as `RunContext.extras`.

    Raises:
        PolicyError: no such folder, or no tensor file in it.
        TraceError: a damaged file.
    """
    if folder is None:
        return {}
    place = Path(folder)
    if not place.is_dir():
        raise PolicyError(f"--artefacts {place}: no such folder; `moesim train-cache TRACE --out {place}` makes one")
    found = {path.stem: _content(path) for path in sorted(place.iterdir()) if path.suffix in SUFFIXES}
    if not found:
        raise PolicyError(
            f"--artefacts {place}: expected files {', '.join(SUFFIXES)}, found none; is it the right folder?"
        )
    return found


def _content(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    arrays = load_named(path)
    return arrays[""] if path.suffix == ".npy" else arrays

"""The seal of our tensor files: a digest of all tensors and of what is said of them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Final

import numpy as np

from moesim.traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SEAL_KEY: Final = "moesim.digest"
"""The key of the digest in a file's metadata."""

OURS: Final = "moesim"
"""The key of the facts in the metadata of every tensor file that moesim writes."""


def sealed(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> dict[str, str]:
    """Return the metadata of a tensor file, its digest among them."""
    return {**metadata, SEAL_KEY: _digest(arrays, metadata)}


def check(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Compare tensors and metadata with their digest; other programs write none.

    Raises:
        TraceError: the file was altered.
    """
    others = {key: metadata[key] for key in metadata if key != SEAL_KEY}
    # Without a digest nothing could be said of tensors of ours that changed.
    if OURS in metadata and SEAL_KEY not in metadata:
        raise TraceError(
            f"{path}: expected a digest, as in every tensor file of moesim, found none;"
            " copy it again, or make it again"
        )
    if SEAL_KEY in metadata and metadata[SEAL_KEY] != _digest(arrays, others):
        raise TraceError(
            f"{path}: expected the tensors that were written, found others: its digest"
            " does not match; copy it again, or make it again"
        )


def _digest(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    facts = [[name, str(values.dtype), values.shape] for name, values in arrays.items()]
    text = json.dumps([sorted(facts, key=str), sorted(metadata.items())])
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()

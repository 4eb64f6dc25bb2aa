"""Seals: digests by which our Parquet and tensor files tell whether they were altered.

Parquet checks nothing by itself: a flipped bit may give other rows. Checksums of pages,
which we write too, cover neither page headers nor the footer. The seal covers all. It
holds two digests, of the bytes before the footer and of the footer with the seal's own
place blanked.
A program that rewrites the file leaves the seal out, and the file counts as unsealed.

A tensor file's seal is one digest of all tensors and of its metadata.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, BinaryIO, Final

import numpy as np

from moesim.base.errors import TraceError
from moesim.base.inputs import open_input

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow.parquet as pq

SEAL_KEY: Final = "moesim.seal"
_MARK: Final = "sealed:"
_BLANK: Final = "0" * 128
# Between key and value lie the type and the length of a Thrift string.
_BEFORE: Final = SEAL_KEY.encode() + b"\x18\x87\x01" + _MARK.encode()

# Behind the footer: its length and the magic number.
_TAIL_BYTES: Final = 8
_PIECE_BYTES: Final = 1 << 20


def reserve(writer: pq.ParquetWriter) -> None:
    """Make room for the seal in the footer of a file that is about to be closed."""
    writer.add_key_value_metadata({SEAL_KEY: _MARK + _BLANK})


def seal(path: Path) -> None:
    """Fill in the seal of a complete file in which room was reserved."""
    with path.open("rb+") as file:
        body, footer = _hashed(file)
        place = footer.index(_BEFORE) + len(_BEFORE)
        file.seek(place - len(footer), 2)
        file.write(_seal(body, footer).encode())


def check_seal(path: Path) -> str:
    """Compare a whole file with its seal if it has one.

    Returns:
        SHA-256 of the file, in hexadecimal.

    Raises:
        TraceError: it was altered.
        OSError: it cannot be read.
    """
    with open_input(path) as file:
        body, footer = _hashed(file)
    before, mark, rest = footer.partition(_BEFORE)
    sealed, after = rest[: len(_BLANK)], rest[len(_BLANK) :]
    blanked = before + mark + _BLANK.encode() + after
    is_right = sealed == _seal(body, blanked).encode()
    if not mark:
        # What is left of a seal was one.
        is_right = not any(part.encode() in footer for part in (SEAL_KEY, _MARK))
    if not is_right:
        raise TraceError(
            f"{path}: expected the bytes that were written, found others: its seal does"
            " not match; copy it again from where it came from, or record or import it"
            " again"
        )
    body.update(footer)
    return body.hexdigest()


def _hashed(file: BinaryIO) -> tuple[hashlib._Hash, bytes]:
    """Hash a file up to its footer, and read that to the end of the file.

    A file that is not Parquet has no footer; its end counts as one.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL_BYTES))
    length = int.from_bytes(file.read(_TAIL_BYTES)[:4], "little") + _TAIL_BYTES
    left = max(0, size - length)
    file.seek(0)
    state = hashlib.sha256()
    while left and (piece := file.read(min(left, _PIECE_BYTES))):
        state.update(piece)
        left -= len(piece)
    return state, file.read()


def _seal(body: hashlib._Hash, blanked: bytes) -> str:
    return body.hexdigest() + hashlib.sha256(blanked).hexdigest()


TENSOR_SEAL_KEY: Final = "moesim.digest"
"""The key of the digest in a file's metadata."""

OURS: Final = "moesim"
"""The key of the facts in the metadata of every tensor file that moesim writes."""


def sealed_metadata(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> dict[str, str]:
    """Return the metadata of a tensor file, its digest among them."""
    return {**metadata, TENSOR_SEAL_KEY: _tensor_digest(arrays, metadata)}


def check_tensors(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Compare tensors and metadata with their digest; other programs write none.

    Raises:
        TraceError: the file was altered.
    """
    others = {key: metadata[key] for key in metadata if key != TENSOR_SEAL_KEY}
    # Without a digest nothing could be said of tensors of ours that changed.
    if OURS in metadata and TENSOR_SEAL_KEY not in metadata:
        raise TraceError(
            f"{path}: expected a digest, as in every tensor file of moesim, found none;"
            " copy it again, or make it again"
        )
    if TENSOR_SEAL_KEY in metadata and metadata[TENSOR_SEAL_KEY] != _tensor_digest(
        arrays, others
    ):
        raise TraceError(
            f"{path}: expected the tensors that were written, found others: its digest"
            " does not match; copy it again, or make it again"
        )


def _tensor_digest(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> str:
    facts = [[name, str(values.dtype), values.shape] for name, values in arrays.items()]
    text = json.dumps([sorted(facts, key=str), sorted(metadata.items())])
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()

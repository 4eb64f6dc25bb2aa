"""Seals: digests by which our Parquet and tensor files tell whether they were altered.

Parquet checks nothing by itself: a flipped bit may give other rows. Checksums of pages,
which we write too, cover neither page headers nor the footer. The seal covers all. It
holds two digests, of the bytes before the footer and of the footer with the seal's own
place blanked, so that the footer can be trusted before any row is read.
A program that rewrites the file leaves the seal out, and the file counts as unsealed.

A tensor file's seal is one digest of all tensors and of its metadata.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

import numpy as np

from moesim.base.errors import TraceError
from moesim.base.inputs import open_input

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow.parquet as pq

SEAL_KEY: Final = "moesim.seal"
_DIGEST_CHARS: Final = 64
_BLANK: Final = "0" * 2 * _DIGEST_CHARS
_MARK: Final = "sealed:"

# Between key and value lie the type and the length of a Thrift string.
_SEAL: Final = re.compile(rb"moesim\.seal\x18\x87\x01sealed:([0-9a-f]{128})")
_REST_OF_A_SEAL: Final = re.compile(rb"moesim\.seal|sealed:")

_MAGIC: Final = b"PAR1"
# Behind the footer: its length and the magic number.
_TAIL_BYTES: Final = 8
_PIECE_BYTES: Final = 1 << 20


class Digests(NamedTuple):
    """Digests of a file, in hexadecimal: of all its bytes, and of those before the
    footer.
    """

    file: str
    body: str


class Footer(NamedTuple):
    """Where the footer of a Parquet file begins, and the body's digest that its seal
    promises; None where there is no seal.
    """

    start: int
    body_digest: str | None


def reserve(writer: pq.ParquetWriter) -> None:
    """Make room for the seal in the footer of a file that is about to be closed."""
    writer.add_key_value_metadata({SEAL_KEY: _MARK + _BLANK})


def seal(path: Path) -> None:
    """Fill in the seal of a complete file in which room was reserved."""
    with path.open("rb+") as file:
        start, footer = _footer(file)
        place = _SEAL.search(footer)
        assert place is not None, "reserve() comes before the file is closed"

        body = _hashed(file, start).hexdigest()
        sealed = body + hashlib.sha256(footer).hexdigest()
        file.seek(start + place.start(1))
        file.write(sealed.encode())


def check_footer(path: Path) -> Footer:
    """Compare the footer with its seal.

    Raises:
        TraceError: it was altered.
        OSError: no such file, or it is none.
    """
    with open_input(path) as file:
        start, footer = _footer(file)
    # What is cut off is not Parquet, which whoever opens it says.
    if not footer.endswith(_MAGIC):
        return Footer(start, None)

    place = _SEAL.search(footer)
    if place is None:
        if _REST_OF_A_SEAL.search(footer):
            raise _altered(path)
        return Footer(start, None)

    body_digest, footer_digest = _halves(place.group(1).decode())
    blanked = footer[: place.start(1)] + _BLANK.encode() + footer[place.end(1) :]
    if hashlib.sha256(blanked).hexdigest() != footer_digest:
        raise _altered(path)
    return Footer(start, body_digest)


def digests(path: Path, footer: Footer) -> Digests:
    """Read a file once, in pieces, and compare it with its seal if it has one.

    Raises:
        TraceError: it was altered.
    """
    with open_input(path) as file:
        state = _hashed(file, footer.start)
        body = state.hexdigest()
        while piece := file.read(_PIECE_BYTES):
            state.update(piece)

    if footer.body_digest not in (None, body):
        raise _altered(path)
    return Digests(state.hexdigest(), body)


def check_seal(path: Path) -> None:
    """Compare a whole file with its seal if it has one.

    Raises:
        TraceError: it was altered.
        OSError: it cannot be read.
    """
    footer = check_footer(path)
    if footer.body_digest is not None:
        digests(path, footer)


def _footer(file: BinaryIO) -> tuple[int, bytes]:
    """Return where the footer begins, and its bytes up to the end of the file.

    A file that is not Parquet has no footer; its end counts as one.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL_BYTES))
    tail = file.read(_TAIL_BYTES)
    length = int.from_bytes(tail[:4], "little") + _TAIL_BYTES
    start = max(0, size - length)
    file.seek(start)
    return start, file.read()


def _hashed(file: BinaryIO, end: int) -> hashlib._Hash:
    """Hash the first `end` bytes."""
    state = hashlib.sha256()
    file.seek(0)
    left = end
    while left and (piece := file.read(min(left, _PIECE_BYTES))):
        state.update(piece)
        left -= len(piece)
    return state


def _halves(sealed: str) -> tuple[str, str]:
    return sealed[:_DIGEST_CHARS], sealed[_DIGEST_CHARS:]


def _altered(path: Path) -> TraceError:
    return TraceError(
        f"{path}: expected the bytes that were written, found others: its seal does"
        " not match; copy it again from where it came from, or record or import it"
        " again"
    )


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

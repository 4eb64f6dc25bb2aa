"""Errors of foreign files: whatever a damaged file provokes becomes one line."""

from __future__ import annotations

import struct
import tokenize
import zipfile
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from moesim.base.errors import TraceError
from moesim.base.inputs import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# What decoding bytes of another program may raise. A `RecursionError` is a
# `RuntimeError`; numpy's npy headers are parsed as Python, hence the tokenizer's.
DECODING_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    OverflowError,
    EOFError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    pa.ArrowException,
)

# A library may quote the file at length; one line holds no more than this.
_REASON_LETTERS = 200


@contextmanager
def decoding(
    path: Path,
    part: str,
) -> Iterator[None]:
    """Turn whatever decoding raises into one line.

    Args:
        path: the file.
        part: what is being read, for the error.

    Raises:
        TraceError: naming the file, `part`, and the reason.
    """
    try:
        yield
    except TraceError:
        raise
    except InputError as error:
        raise TraceError(f"{path}: {part}: {error}") from None
    except DECODING_ERRORS as error:
        reason = " ".join(str(error).split())[:_REASON_LETTERS]
        reason = reason or type(error).__name__

        if isinstance(error, RecursionError):
            reason = "more lists and objects in each other than can be read"

        raise TraceError(
            f"{path}: {part}: expected a whole, well-formed file, found: {reason}; was"
            " it cut off while copying?"
        ) from None


def layout_error(
    path: Path,
    place: str,
    expected: object,
    actual: object,
    way_out: str = "dump it again",
) -> TraceError:
    """Return the one-line error of a file that does not keep to its own layout."""
    return TraceError(
        f"{path}: {place}: expected {expected}, found {actual}; {way_out}"
    )

"""The beginning and the lines of text files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Text parsed at a time. A query of DuckDB costs some milliseconds whatever it holds: at
# half a MiB they were half of the time per row.
TEXT_BYTES = 1 << 23
# The first chunk is small, because it is parsed twice: the importer learns from it what
# the file says about itself.
_FIRST_BYTES = 1 << 16


def head(
    path: Path,
    count: int = 65_536,
) -> bytes:
    """Return the first bytes of a file; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError:
        return b""


def first_object(path: Path) -> Any:
    """Return the JSON value on the first line that is not empty, or None; never
    raises.
    """
    for line in head(path).splitlines():
        if line.strip():
            try:
                return json.loads(line)
            except (ValueError, RecursionError):
                return None

    return None


def line_chunks(
    path: Path,
    *,
    skip: int = 0,
) -> Iterator[tuple[int, bytes]]:
    """Read whole lines: a few at first, then about `TEXT_BYTES` at a time.

    Args:
        path: a text.
        skip: lines before the first chunk.

    Yields:
        The number of the chunk's first line, from 1, and its bytes.
    """
    number = 1 + skip

    with path.open("rb") as file:
        for _ in range(skip):
            file.readline()

        size = min(_FIRST_BYTES, TEXT_BYTES)
        while data := file.read(size):
            data += file.readline()
            yield number, data
            size = TEXT_BYTES

            # numpy counts several times as fast as `bytes.count` does.
            line_ends = np.frombuffer(data, np.uint8) == ord("\n")
            number += int(np.count_nonzero(line_ends))

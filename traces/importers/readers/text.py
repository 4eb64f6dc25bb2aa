"""The beginning and the lines of text files."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

# Text parsed at a time. A query of DuckDB costs some milliseconds whatever it holds: at
# half a MiB they were half of the time per row.
TEXT_BYTES = 1 << 23
# The first chunk is small, because it is parsed twice: the importer learns from it what
# the file says about itself.
_FIRST_BYTES = 1 << 16
_COUNTED_BYTES = 1 << 18


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


@contextmanager
def whole_lines(path: Path, beside: Path) -> Iterator[tuple[Path, list[str]]]:
    """A text without a last line that was cut off, and a remark about it; the file
    itself where nothing is missing.

    Args:
        path: the file.
        beside: a copy without that line lies in a folder beside this one meanwhile.
    """
    end = _end_of_lines(path)
    if end is None:
        yield path, []
        return
    beside.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=beside.parent, prefix=".import-") as folder:
        copy = Path(folder) / path.name
        with path.open("rb") as source, copy.open("wb") as target:
            while end and (data := source.read(min(end, TEXT_BYTES))):
                end -= target.write(data)
        yield copy, ["the last line was cut off and was left out"]


def _end_of_lines(path: Path) -> int | None:
    """Bytes up to the end of the last whole line; None where none is cut off, or where
    this is no text.
    """
    start = head(path)
    if not start or b"\0" in start or start.startswith(b"PAR1"):
        return None
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        # A line that is longer than this is no row of a dump.
        file.seek(max(0, size - TEXT_BYTES))
        tail = file.read()
    newline = tail.rfind(b"\n")
    cut = len(tail) - newline - 1
    return size - cut if cut and newline >= 0 else None


def _line_ends(data: bytes) -> int:
    """How many lines end in some text."""
    # numpy counts several times as fast as `bytes.count` does, in pieces that stay in
    # the processor's cache.
    text = np.frombuffer(data, np.uint8)
    pieces = range(0, len(text), _COUNTED_BYTES)
    return sum(
        int(np.count_nonzero(text[first : first + _COUNTED_BYTES] == ord("\n")))
        for first in pieces
    )


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

            number += _line_ends(data)

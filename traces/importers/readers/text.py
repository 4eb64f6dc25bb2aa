"""The lines of text files."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tempfile
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.traces.importers.readers.foreign import head

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Text that is searched several times stays in the processor's cache; more would be in
# memory that is new each time.
_CHUNK_BYTES = 1 << 16
# A line that is longer than this is no row of a dump.
_LONGEST_LINE = 1 << 23


def first_object(path: Path) -> Any:
    """Return the JSON value on the first line that is not empty, or None; never
    raises.
    """
    for _, line in filled(io.BytesIO(head(path))):
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None
    return None


def first_lines(path: Path) -> list[bytes]:
    """Return up to 50 lines, without their ends; enough to tell layouts apart."""
    lines = head(path).replace(b"\r", b"").split(b"\n")
    # The last line of what was read may be cut.
    return (lines[:-1] or lines)[:50]


def first_line(path: Path, skip: int = 0) -> tuple[int, bytes] | None:
    """Return the first line of a file that is not blank, with its number; None without
    one.

    Args:
        path: the file.
        skip: how many such lines are left out.
    """
    with path.open("rb") as file:
        return next(islice(filled(file), skip, None), None)


def filled(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Number lines from 1, and leave out those that are blank."""
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def line_chunks(path: Path) -> Iterator[bytes]:
    """Read whole lines, about `_CHUNK_BYTES` at a time."""
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            yield data + file.readline()


def sections(path: Path, header: bytes) -> list[tuple[int, int]]:
    """Return first byte and length of the rows below each line `header`, and of those
    above the first one: people join files.
    """
    line = re.compile(rb"^%s[ \t\r]*(?:\n|\Z)" % re.escape(header), re.MULTILINE)
    starts = [0]
    ends = []
    size = 0
    for chunk in line_chunks(path):
        if header in chunk:
            for match in line.finditer(chunk):
                ends.append(size + match.start())
                starts.append(size + match.end())
        size += len(chunk)
    pairs = zip(starts, [*ends, size], strict=True)
    return [(start, end - start) for start, end in pairs if start < end]


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
        shutil.copyfile(path, copy)
        os.truncate(copy, end)
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
        file.seek(max(0, size - _LONGEST_LINE))
        tail = file.read()
    newline = tail.rfind(b"\n")
    cut = len(tail) - newline - 1
    return size - cut if cut and newline >= 0 else None

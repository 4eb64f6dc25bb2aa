"""The beginning and the lines of text files."""

from __future__ import annotations

import io
import json
import mmap
import os
import re
import tempfile
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from moesim.base.inputs import open_input
from moesim.traces.format.parquet import values
from moesim.traces.importers.readers.foreign import decoding, layout_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np

    Block = dict[str, np.ndarray]

# Text copied at a time.
TEXT_BYTES = 1 << 23
# Text that is searched several times stays in the processor's cache; more would be in
# memory that is new each time.
_CHUNK_BYTES = 1 << 16


def head(path: Path, count: int = 65_536) -> bytes:
    """Return the first bytes of a file; none where it cannot be read."""
    try:
        with open_input(path) as file:
            return file.read(count)
    except OSError:
        return b""


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


# -- columns of a CSV ------------------------------------------------------------------


# Text parsed at a time; a line must be shorter.
CSV_BYTES = 1 << 20


def sections(path: Path, header: bytes) -> list[tuple[int, int]]:
    """Return first byte and length of the rows below each line `header`, and of those
    above the first one: people join files.
    """
    if not path.stat().st_size:
        return []
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        line = re.compile(rb"^%s[ \t\r]*(?:\n|\Z)" % re.escape(header), re.MULTILINE)
        headers = [match.span() for match in line.finditer(text)]
        starts = [0, *(end for _, end in headers)]
        ends = [*(start for start, _ in headers), len(text)]
    pairs = zip(starts, ends, strict=True)
    return [(start, end - start) for start, end in pairs if start < end]


def part_of(path: Path, start: int, length: int) -> Any:
    """Return a part of a file as a file."""
    with pa.memory_map(str(path)) as file:
        return pa.BufferReader(file.read_buffer().slice(start, length))


def csv_columns(
    path: Path,
    names: Sequence[str],
    types: Mapping[str, str],
    skip: int,
    section: tuple[int, int] | None = None,
) -> Iterator[tuple[int, Block]]:
    """Read the columns that `types` names.

    Args:
        path: the file.
        names: all its columns, in order.
        types: column -> numpy's name of its type; other columns may hold anything.
        skip: lines before the first row.
        section: first byte and length; the whole file if None.

    Yields:
        The number of the first row, from 0, and the columns.

    Raises:
        TraceError: a row with more or fewer columns, an empty value, or one that is not
            of its column's type.
    """
    from pyarrow import csv  # noqa: PLC0415 - few imports need it

    used = [name for name in names if name in types]
    read_options = csv.ReadOptions(
        column_names=list(names), use_threads=False, block_size=CSV_BYTES
    )
    convert_options = csv.ConvertOptions(
        include_columns=used,
        column_types={name: types[name] for name in used},
        # ``nan`` is a number, and an empty value is an error.
        null_values=[],
        strings_can_be_null=False,
    )

    with path.open("rb") if section is None else part_of(path, *section) as file:
        # Arrow skips only what fits into one block.
        for _ in range(skip):
            file.readline()
        with decoding(path, "CSV"):
            batches = csv.open_csv(
                file, read_options=read_options, convert_options=convert_options
            )

        row = 0
        while True:
            with decoding(path, f"CSV from row {row}"):
                batch = next(batches, None)
            if batch is None:
                return

            columns = [batch.column(name) for name in used]
            if any(column.null_count for column in columns):
                place = f"rows from {row}"
                expected = "values in every column"
                raise layout_error(path, place, expected, "empty values")
            if batch.num_rows:
                yield (row, dict(zip(used, map(values, columns), strict=True)))
            row += batch.num_rows

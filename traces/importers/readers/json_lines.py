"""Lines of JSON as Arrow columns of stated types, parsed by DuckDB.

A *structure* says which keys are wanted and what they hold, as DuckDB's
``json_transform`` takes it: ``{"pos": "DOUBLE", "experts": ["DOUBLE"]}``. A key that a
line does not have, or whose value is of another kind, is null there.

Numbers are asked for as ``DOUBLE``: DuckDB rounds 0.5 where an integer is asked for. It
is more lenient than JSON in two ways: a number in quotes is that number, and a comma
may follow the last value.
"""

from __future__ import annotations

import functools
import glob
import json
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from moesim.base.inputs import MOST_LINE_BYTES, quoted
from moesim.traces.format.parquet import batches_of, flat, values
from moesim.traces.importers.readers.foreign import decoding, head, layout_error
from moesim.traces.importers.readers.tables import Rows, is_null
from moesim.traces.importers.readers.text import filled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from moesim.base.errors import TraceError

# Values that are yielded at a time, which stay in the processor's cache.
PIECE_BYTES = 2 << 20
# DuckDB returns so many lines at a time, fewer of long ones.
BATCH_LINES = 2048
_BATCH_BYTES = 32 << 20


class Lines(NamedTuple):
    """Parsed lines. N lines that are not blank.

    Attributes:
        path: the file, for errors.
        held: the whole text, where it is not that of the file.
        first: how many lines that are not blank stand before them.
        values: what they hold, an Arrow array [N] of the structure.
    """

    path: Path
    held: Sequence[bytes] | None
    first: int
    values: Any

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of lines that are objects."""
        return columns_of(self.values)

    def rows(self, columns: Mapping[str, Any], line: np.ndarray) -> Rows:
        """Return rows of some of the lines; `line` [N] says which each comes from."""
        arrays = {name: [column] for name, column in columns.items()}

        def fault(row: int, name: str, expected: str, actual: object) -> TraceError:
            del actual
            return self.fault(int(line[row]), name, expected)

        return Rows(self.path, arrays, len(line), fault)

    def fault(self, line: int, name: str, expected: str) -> TraceError:
        """Return the error of one line, which is quoted."""
        number, text = self._numbered(line)
        place = f"line {number}: {name}" if name else f"line {number}"
        with decoding(self.path, place):
            json.loads(text)
        quote = quoted(text.decode(errors="replace").strip(), 120)
        return layout_error(self.path, place, expected, quote)

    def _numbered(self, line: int) -> tuple[int, bytes]:
        """The number and the text of one line."""
        if self.held is not None:
            return 1 + line, self.held[line]
        with self.path.open("rb") as file:
            return next(islice(filled(file), self.first + line, None))


def json_lines(
    path: Path,
    structure: Any,
    skip: int = 0,
    held: Sequence[bytes] | None = None,
) -> Iterator[Lines]:
    """Parse lines, some at a time.

    Args:
        path: the file.
        structure: what is wanted of a line.
        skip: how many of the first lines that are not blank are left out.
        held: the lines, where they are in memory; none of them is blank.

    Raises:
        TraceError: a line that is not JSON, or longer than `MOST_LINE_BYTES`.
    """
    import duckdb  # noqa: PLC0415 - a tenth of a second that only JSON pays

    batches = _held(held, structure) if held is not None else _file(path, structure)
    pieces = _pieces(batches)
    place = 0
    while True:
        try:
            piece = next(pieces, None)
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            behind = f"lines behind line {place}"
            expected = f"JSON in lines of up to {MOST_LINE_BYTES >> 20} MiB"
            reason = " ".join(str(error).split())
            raise layout_error(path, behind, expected, reason) from None
        if piece is None:
            return
        first = min(max(0, skip - place), len(piece))
        lines = Lines(path, held, place + first, piece[first:])
        if lines.values.null_count:
            line = int(is_null(lines.values).argmax())
            raise lines.fault(line, "", "JSON of the layout")
        if len(lines.values):
            yield lines
        place += len(piece)


@functools.cache
def _connection() -> Any:
    """A database in memory, kept open: opening one takes longer than a small file."""
    import duckdb  # noqa: PLC0415 - as above

    # Extensions would be fetched from the network.
    return duckdb.connect(config={"autoinstall_known_extensions": False, "threads": 1})


def _file(path: Path, structure: Any) -> Iterator[pa.RecordBatch]:
    """What the lines of a file hold, as batches with one column."""
    # What looks like a pattern is the name of a file here. A line that is not JSON is
    # null; a suffix or a folder's name says nothing.
    query = f"""
        FROM read_json(
            {_quoted(glob.escape(str(path.absolute())))},
            columns = {{line: {_quoted(_sql_type(structure))}}},
            format = 'newline_delimited',
            records = false,
            ignore_errors = true,
            maximum_object_size = {MOST_LINE_BYTES},
            compression = 'none',
            hive_partitioning = false
        )
    """
    start = head(path)
    fitting = _BATCH_BYTES * start.count(b"\n") // max(1, len(start))
    # Another query would end this one, so it has a connection of its own.
    relation = _connection().cursor().sql(query)
    yield from batches_of(relation, min(max(1, fitting), BATCH_LINES))


def _held(lines: Sequence[bytes], structure: Any) -> Iterator[pa.RecordBatch]:
    """The same of lines in memory."""
    offsets = np.cumsum([0, *map(len, lines)], dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(lines))]
    column = pa.Array.from_buffers(pa.large_string(), len(lines), buffers)
    table = pa.Table.from_arrays([column], ["line"])
    value = f"json_transform(line, {_quoted(json.dumps(structure))})"
    parsed = _connection().from_arrow(table).project(value).to_arrow_table()
    yield from parsed.to_batches()


def _quoted(text: str, mark: str = "'") -> str:
    return f"{mark}{text.replace(mark, 2 * mark)}{mark}"


def _sql_type(structure: Any) -> str:
    """The type of what a structure describes."""
    if isinstance(structure, list):
        return f"{_sql_type(structure[0])}[]"
    if isinstance(structure, dict):
        fields = [
            f"{_quoted(name, chr(34))} {_sql_type(kind)}"
            for name, kind in structure.items()
        ]
        return f"STRUCT({', '.join(fields)})"
    return str(structure)


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Array]:
    """The only column of batches, joined to arrays of about `PIECE_BYTES`."""
    pending: list[pa.Array] = []
    size = 0
    for batch in batches:
        pending.append(batch.column(0))
        size += batch.nbytes
        if size >= PIECE_BYTES:
            yield pa.concat_arrays(pending)
            pending = []
            size = 0
    if pending:
        yield pa.concat_arrays(pending)


def columns_of(structs: Any) -> dict[str, Any]:
    """Return the columns of an array of objects."""
    # `flatten` hands a null object down to its columns.
    names = [field.name for field in structs.type]
    return dict(zip(names, structs.flatten(), strict=True))


def lengths_of(array: Any) -> np.ndarray:
    """Return the length of each list of a list array [N], 0 for null: int64 [N]."""
    return np.diff(values(array.offsets)).astype(np.int64)


def items_of(array: Any) -> pa.Array:
    """Return the values of all lists of a list array, one list after the other."""
    return flat(array)

"""Lines of JSON as Arrow columns of stated types, parsed by DuckDB.

A *structure* says which keys are wanted and what they hold, as DuckDB's
``json_transform`` takes it: ``{"pos": "DOUBLE", "experts": ["DOUBLE"]}``. A key that a
line does not have, or whose value is of another kind, is null there.

Numbers are asked for as ``DOUBLE``: DuckDB rounds 0.5 where an integer is asked for,
and `whole_numbers` must be able to refuse it. It is more lenient than JSON in two ways:
a number in quotes is that number, and a comma may follow the last value.
"""

from __future__ import annotations

import functools
import glob
import json
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from moesim.base.inputs import MOST_LINE_BYTES
from moesim.traces.format.parquet import batches_of, flat, values
from moesim.traces.importers.readers.foreign import decoding, layout_error
from moesim.traces.importers.readers.text import filled, head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

# Values that are yielded at a time, which stay in the processor's cache.
PIECE_BYTES = 2 << 20
# DuckDB returns so many lines at a time, fewer of long ones.
BATCH_LINES = 2048
_BATCH_BYTES = 32 << 20


class JsonLines(NamedTuple):
    """Parsed lines. N lines that are not blank.

    Attributes:
        path: the file, for errors.
        text: begins to read all lines of the text again, blank ones too, for errors.
        place: int64 [N], how many lines that are not blank stand before each.
        values: what they hold, an Arrow array [N] of the structure.
        names: our names of keys that the lines call otherwise, by theirs.
    """

    path: Path
    text: Callable[[], Iterable[bytes]]
    place: np.ndarray
    values: Any
    names: Mapping[str, str] = MappingProxyType({})

    def number(self, line: int) -> int:
        """Return the number of one line in the text, from 1."""
        return self._numbered(line)[0]

    def parsed(self, line: int) -> Any:
        """Parse one line as Python does, to say what is wrong with it.

        Keys of an object bear our names.

        Raises:
            TraceError: the line is not JSON.
        """
        number, text = self._numbered(line)
        with decoding(self.path, f"line {number}"):
            value = json.loads(text.decode())
        if not self.names or not isinstance(value, dict):
            return value
        return {self.names.get(key, key): part for key, part in value.items()}

    def require_json(self, line: int) -> None:
        """Check one line that came out as null.

        Raises:
            TraceError: the line is not JSON.
        """
        import duckdb  # noqa: PLC0415 - a tenth of a second that only JSON pays

        self.parsed(line)
        number, text = self._numbered(line)
        try:
            _connection().execute("SELECT json(?)", [text.decode()]).fetchall()
        except duckdb.Error as error:
            # Python takes what DuckDB refuses: a lone half of a surrogate pair.
            expected = "JSON that can be read"
            raise layout_error(
                self.path, f"line {number}", expected, _in_one_line(error)
            ) from None

    def _numbered(self, line: int) -> tuple[int, bytes]:
        """The number and the text of one line."""
        return next(islice(filled(self.text()), int(self.place[line]), None))


class JsonLinesReader:
    """Parses lines of one structure.

    Args:
        structure: what is wanted of a line, as ``json_transform`` takes it.
        keys: what the lines call keys of an object; others stand for themselves.
    """

    def __init__(self, structure: Any, keys: Mapping[str, str] | None = None) -> None:
        if keys:
            # Parsed under the names in the file, and renamed behind the parser.
            structure = {keys.get(key, key): kind for key, kind in structure.items()}
        self._names = {theirs: ours for ours, theirs in (keys or {}).items()}
        self._structure = structure

    def read(self, path: Path, skip: int = 0) -> Iterator[JsonLines]:
        """Read the lines of a file, some at a time.

        Args:
            path: the file.
            skip: how many of the first lines that are not blank are left out.

        Raises:
            TraceError: a line that is not JSON, or longer than `MOST_LINE_BYTES`.
        """
        import duckdb  # noqa: PLC0415 - as above

        pieces = _pieces(_batches(path, self._structure))
        text = partial(_lines_of, path)
        place = 0
        while True:
            try:
                piece = next(pieces, None)
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                behind = f"lines behind line {place}"
                expected = f"JSON in lines of up to {MOST_LINE_BYTES >> 20} MiB"
                reason = _in_one_line(error)
                raise layout_error(path, behind, expected, reason) from None
            if piece is None:
                return

            first = min(max(0, skip - place), len(piece))
            yield self._checked(path, text, place + first, piece[first:])
            place += len(piece)

    def parse(self, path: Path, lines: Sequence[bytes]) -> JsonLines:
        """Parse lines in memory, none of them blank.

        Raises:
            TraceError: a line that is not JSON.
        """
        offsets = np.cumsum([0, *map(len, lines)], dtype=np.int64)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(lines))]
        column = pa.Array.from_buffers(pa.large_string(), len(lines), buffers)
        table = pa.Table.from_arrays([column], ["line"])

        value = f"json_transform(line, {_quoted(json.dumps(self._structure))})"
        # As in a file, a line that is not JSON is null.
        value = f"CASE WHEN json_valid(line) THEN {value} END"
        parsed = _connection().from_arrow(table).project(value).to_arrow_table()
        return self._checked(path, lambda: lines, 0, parsed.column(0).combine_chunks())

    def _checked(
        self, path: Path, text: Callable[[], Iterable[bytes]], first: int, parsed: Any
    ) -> JsonLines:
        """Parsed lines from the place `first` on, if all of them are JSON."""
        place = first + np.arange(len(parsed))
        lines = JsonLines(path, text, place, parsed, self._names)
        if parsed.null_count:
            lines.require_json(int(is_null(parsed).argmax()))
        return (
            lines._replace(values=_renamed(parsed, self._names))
            if self._names
            else lines
        )


@functools.cache
def _connection() -> Any:
    """A database in memory, kept open: opening one takes longer than a small file."""
    import duckdb  # noqa: PLC0415 - as above

    return duckdb.connect(
        config={
            # Extensions would be fetched from the network.
            "autoinstall_known_extensions": False,
            "threads": 1,
        }
    )


def _batches(path: Path, structure: Any) -> Iterator[pa.RecordBatch]:
    """What the lines of a file hold, as batches with one column."""
    # What looks like a pattern is the name of a file here.
    name = _quoted(glob.escape(str(path.absolute())))
    # A line that is not JSON is null; a suffix or a folder's name says nothing.
    query = f"""
        FROM read_json(
            {name},
            columns = {{line: {_quoted(_sql_type(structure))}}},
            format = 'newline_delimited',
            records = false,
            ignore_errors = true,
            maximum_object_size = {MOST_LINE_BYTES},
            compression = 'none',
            hive_partitioning = false
        )
    """
    # Another query would end this one, so it has a connection of its own.
    connection = _connection().cursor()
    yield from batches_of(connection.sql(query), _batch_lines(path))


def _quoted(text: str, mark: str = "'") -> str:
    return f"{mark}{text.replace(mark, 2 * mark)}{mark}"


def _sql_type(structure: Any) -> str:
    """The type of what a structure describes."""
    if isinstance(structure, list):
        return f"{_sql_type(structure[0])}[]"
    if isinstance(structure, dict):
        names = [_quoted(name, mark='"') for name in structure]
        kinds = map(_sql_type, structure.values())
        return f"STRUCT({', '.join(map(' '.join, zip(names, kinds, strict=True)))})"
    return str(structure)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _batch_lines(path: Path) -> int:
    """How many lines DuckDB returns at a time, if all are as long as the first ones."""
    start = head(path)
    fitting = _BATCH_BYTES * start.count(b"\n") // max(1, len(start))
    return min(max(1, fitting), BATCH_LINES)


def _lines_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


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


def _renamed(structs: Any, names: Mapping[str, str]) -> Any:
    """An array of objects whose keys bear our names; `names` has them by theirs."""
    columns = columns_of(structs)
    ours = [names.get(name, name) for name in columns]
    return pa.StructArray.from_arrays(list(columns.values()), names=ours)


def columns_of(structs: Any) -> dict[str, Any]:
    """Return the columns of an array of objects."""
    # `flatten` hands a null object down to its columns.
    names = [field.name for field in structs.type]
    return dict(zip(names, structs.flatten(), strict=True))


def list_lengths(array: Any) -> np.ndarray:
    """Return the length of each list of a list array [N], 0 for null: int64 [N]."""
    return np.diff(values(array.offsets)).astype(np.int64)


def list_values(array: Any) -> pa.Array:
    """Return the values of all lists of a list array, one list after the other."""
    return flat(array)


def whole_numbers(array: pa.Array, limit: int) -> tuple[np.ndarray, int]:
    """Return doubles [N] as int32, or int64 where `limit` is above 2**31, and the place
    of the first that is null, negative, not below `limit` or no whole number; -1 where
    all are fine.
    """
    kind = np.int32 if limit <= 1 << 31 else np.int64
    if array.null_count:
        return np.empty(0, kind), int(is_null(array).argmax())

    doubles = values(array)
    # What is not a number makes the least one, too, and compares as false.
    if not len(doubles) or (doubles.min() >= 0 and doubles.max() < limit):
        integers = doubles.astype(kind)
        if (integers == doubles).all():
            return integers, -1

    in_range = (doubles >= 0) & (doubles < limit)
    fine = in_range & (np.floor(doubles) == doubles)
    return np.empty(0, kind), int(fine.argmin())


def is_null(array: pa.Array) -> np.ndarray:
    """Return which values of an array [N] are null: bool [N]."""
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False))

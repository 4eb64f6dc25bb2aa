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
import json
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from moesim.traces.format.arrow import flat, numbers, values
from moesim.traces.importers.readers.errors import decoding, layout_error

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class JsonLines(NamedTuple):
    """Parsed lines. N lines that are not blank.

    Attributes:
        path: the file, for errors.
        number: int64 [N], the number of each line in the file, from 1.
        text: the lines themselves, Arrow strings [N].
        values: what they hold, an Arrow array [N] of the structure.
        names: our names of keys that the lines call otherwise, by theirs.
    """

    path: Path
    number: np.ndarray
    text: pa.Array
    values: Any
    names: Mapping[str, str] = MappingProxyType({})

    def parsed(self, line: int) -> Any:
        """Parse one line as Python does, to say what is wrong with it.

        Keys of an object bear our names.

        Raises:
            TraceError: the line is not JSON.
        """
        with decoding(self.path, f"line {self.number[line]}"):
            value = json.loads(self.text[line].as_py())
        if not self.names or not isinstance(value, dict):
            return value
        return {self.names.get(key, key): part for key, part in value.items()}


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
        quoted = _quoted(json.dumps(structure))
        self._transform = f"json_transform(line, {quoted}) AS value"

    def parse(
        self,
        path: Path,
        number: int,
        data: bytes,
    ) -> JsonLines:
        """Parse whole lines, the last one perhaps without its end.

        Args:
            path: the file, for errors.
            number: number of the first line in the file.
            data: the lines.

        Raises:
            TraceError: a line is not JSON.
        """
        import duckdb  # noqa: PLC0415 - a tenth of a second that only JSON pays

        lines = _lines(number, data)
        table = pa.Table.from_arrays([lines.text], ["line"])

        try:
            # A projection keeps the order of the lines.
            parsed = _connection().from_arrow(table).project(self._transform)
            column = parsed.to_arrow_table().column("value")
        except (duckdb.Error, pa.ArrowException, UnicodeDecodeError) as error:
            raise _first_fault(path, lines, error) from None

        parsed_values = column.combine_chunks()
        if self._names:
            parsed_values = _renamed(parsed_values, self._names)
        return JsonLines(path, lines.number, lines.text, parsed_values, self._names)


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


def _quoted(text: str) -> str:
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


class _Lines(NamedTuple):
    number: np.ndarray
    text: pa.Array


def _lines(
    number: int,
    data: bytes,
) -> _Lines:
    """The lines of a text as Arrow strings over its own bytes, blank ones left out."""
    letters = np.frombuffer(data, np.uint8)
    stops = np.flatnonzero(letters == ord("\n")) + 1
    if len(letters) and (not len(stops) or stops[-1] != len(letters)):
        stops = np.append(stops, len(letters))
    offsets = np.concatenate(([0], stops)).astype(np.int64)

    # Large strings: 64-bit offsets, for a line of many GiB must not wrap around.
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    text = pa.Array.from_buffers(pa.large_string(), len(stops), buffers)
    line_numbers = number + np.arange(len(stops))

    if len(stops):
        kept = _filled_lines(data, letters, offsets)
        if len(kept) < len(stops):
            text = text.take(numbers(kept))
            line_numbers = line_numbers[kept]

    return _Lines(line_numbers, text)


def _filled_lines(
    data: bytes,
    letters: np.ndarray,
    offsets: np.ndarray,
) -> np.ndarray:
    """int64: which lines are not blank."""
    # Blanks of JSON are below 33: few lines have to be looked at one by one.
    highest = np.maximum.reduceat(letters, offsets[:-1])
    blank = [
        line
        for line in np.flatnonzero(highest <= ord(" ")).tolist()
        if not data[offsets[line] : offsets[line + 1]].strip(b" \t\r\n")
    ]
    return np.delete(np.arange(len(highest)), blank)


def _first_fault(
    path: Path,
    lines: _Lines,
    error: Exception,
) -> Exception:
    """The error of the first line that is not JSON; DuckDB does not say which it is."""
    for number, text in zip(lines.number.tolist(), lines.text, strict=True):
        with decoding(path, f"line {number}"):
            json.loads(text.as_py())

    # Python takes what DuckDB refused, for instance a lone half of a surrogate pair.
    last = int(lines.number[-1]) if len(lines.number) else 0
    reason = " ".join(str(error).split())
    return layout_error(path, f"lines up to {last}", "JSON that can be read", reason)


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


def whole_numbers(
    array: pa.Array,
    limit: int,
) -> tuple[np.ndarray, int]:
    """Return doubles [N] as int64, and the place of the first that is null, negative,
    not below `limit` or no whole number; -1 where all are fine.
    """
    if array.null_count:
        return np.empty(0, np.int64), int(is_null(array).argmax())

    doubles = values(array)
    # What is not a number compares as false.
    in_range = (doubles >= 0) & (doubles < limit)
    fine = in_range & (np.floor(doubles) == doubles)
    if fine.all():
        return doubles.astype(np.int64), -1

    return np.empty(0, np.int64), int(fine.argmin())


def is_null(array: pa.Array) -> np.ndarray:
    """Return which values of an array [N] are null: bool [N]."""
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False))

"""Tables of routing: rows of CSV, Parquet or JSON lines, some at a time, as numpy
arrays of the kinds that a trace has.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from moesim.base.inputs import quoted
from moesim.traces.format.parquet import (
    codes,
    flat,
    numbers,
    open_parquet,
    read_schema,
    values,
)
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase
from moesim.traces.format.sorting import BATCH_ROWS, Appearance
from moesim.traces.importers.readers.foreign import decoding, layout_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from moesim.base.errors import TraceError

    Block = dict[str, np.ndarray]

LISTS = ("experts", "weights", "scores", *PREDICTION_COLUMNS)
"""Our columns that hold several values a row."""

# Of whole numbers: type, least value, and the first that is too large.
_KINDS = {
    "expert": (np.uint16, 0, 1 << 16),
    "experts": (np.uint16, 0, 1 << 16),
    "rank": (np.int64, 0, 1 << 63),
    "from_end": (np.int32, -(1 << 31), 1 << 31),
    "residency": (np.int8, 0, 3),
    "dropped": (np.int8, 0, 2),
    "read_bytes": (np.int64, 0, 1 << 63),
    "step": (np.int64, 0, 1 << 53),
}
_WHOLE = (np.int32, 0, 1 << 31)
_WRONG_MAPPING = "is the mapping right?"
_PHASES = {
    "prefill": Phase.PREFILL,
    "prompt": Phase.PREFILL,
    "0": Phase.PREFILL,
    "decode": Phase.DECODE,
    "generate": Phase.DECODE,
    "1": Phase.DECODE,
}
# Text parsed at a time; a line must be shorter.
CSV_BYTES = 1 << 20
# What the types of columns are taken from where nobody states them.
_INFERRED_BYTES = 8 << 20


class Rows(NamedTuple):
    """Some rows of a table. N rows.

    Attributes:
        path: the file, for errors.
        columns: our column -> Arrow arrays [N]: one, or several that are a list.
        length: N.
        fault: the error of a row, our column, what was expected and what was found.
    """

    path: Path
    columns: Mapping[str, Sequence[Any]]
    length: int
    fault: Callable[[int, str, str, object], TraceError]


def blocks(
    parts: Iterable[Rows],
    sequences: Appearance | None = None,
    *,
    keeps_numbers: bool = False,
) -> Iterator[Block]:
    """Return rows as numpy arrays, checked one by one.

    Args:
        parts: the rows.
        sequences: numbers them by their first row; each file has its own where None.
        keeps_numbers: sequences have the numbers that the file gives them.

    Raises:
        TraceError: a value that is missing or no such thing, lists of several lengths.
    """
    sequences = sequences or Appearance()
    widths: dict[str, int] = {}
    for rows in parts:
        block: Block = {"seq": np.zeros(rows.length, np.int32)}
        for name, arrays in rows.columns.items():
            _check_nulls(rows, name, arrays)
            if name == "phase":
                block[name] = _phases(rows, arrays[0])
            elif name == "seq" and not keeps_numbers:
                block[name] = _sequences(arrays[0], sequences)
            elif name in LISTS:
                block[name] = _lists(rows, name, arrays, widths)
            else:
                block[name] = _scalars(rows, name, arrays[0])
        yield block


def _check_nulls(rows: Rows, name: str, arrays: Sequence[Any]) -> None:
    for array in arrays:
        if array.null_count:
            row = int(np.argmax(is_null(array)))
            raise rows.fault(row, name, "a value in every row", "null")


def is_null(array: Any) -> np.ndarray:
    """Return which values of an Arrow array [N] are null: bool [N]."""
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False))


def _scalars(rows: Rows, name: str, array: Any) -> np.ndarray:
    if name == "weight":
        _check_numbers(rows, name, array)
        return values(array).astype(np.float32)
    return _whole(rows, name, array, 1)


def _check_numbers(rows: Rows, name: str, array: Any) -> None:
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        raise layout_error(rows.path, name, "numbers", array.type, _WRONG_MAPPING)


def _whole(rows: Rows, name: str, array: Any, width: int) -> np.ndarray:
    """Whole numbers within the limits of a column, `width` of them a row."""
    _check_numbers(rows, name, array)
    kind, least, limit = _KINDS.get(name, _WHOLE)
    given = values(array)
    if not len(given):
        return given.astype(kind)
    # What is not a number makes the least one, too, and compares as false.
    if given.min() >= least and given.max() < limit:
        integers = given.astype(kind, copy=False)
        if given.dtype.kind != "f" or (integers == given).all():
            return integers
    fine = (given >= least) & (given < limit) & (np.floor(given) == given)
    at = int(fine.argmin())
    expected = f"a whole number {least}..{limit - 1}"
    if name not in _KINDS:
        expected = "a whole number from 0"
    raise rows.fault(at // width, name, expected, given[at])


def _phases(rows: Rows, array: Any) -> np.ndarray:
    """int8 [N] of names, or of 0 and 1."""
    if pa.types.is_integer(array.type):
        phase = values(array)
        wrong = (phase < 0) | (phase > 1)
        if wrong.any():
            row = int(wrong.argmax())
            expected = "0 (prefill) or 1 (decode)"
            raise rows.fault(row, "phase", expected, phase[row])
        return phase.astype(np.int8)

    known = codes(array, list(_PHASES))
    if (known < 0).any():
        row = int(np.argmax(known < 0))
        expected = f"one of {', '.join(_PHASES)}"
        raise rows.fault(row, "phase", expected, array[row].as_py())
    return np.array(list(_PHASES.values()), np.int8)[known]


def _sequences(array: Any, sequences: Appearance) -> np.ndarray:
    """Numbers of sequences, whatever their names."""
    if pa.types.is_integer(array.type):
        return sequences.of_numbers(values(array))
    is_encoded = isinstance(array, pa.DictionaryArray)
    encoded = array if is_encoded else array.dictionary_encode()
    labels = encoded.dictionary.to_pylist()
    return sequences.of_labels(labels, values(encoded.indices))


def _lists(
    rows: Rows, name: str, arrays: Sequence[Any], widths: dict[str, int]
) -> np.ndarray:
    """[N, K] of a column of lists or of texts, or of several plain columns."""
    lengths, cells = _cells(name, arrays)
    width = widths.setdefault(name, int(lengths[0]) if len(lengths) else 1)
    wrong = lengths != width
    if width < 1 or wrong.any():
        row = int(wrong.argmax())
        expected = f"{max(width, 1)} values as in the first row"
        raise rows.fault(row, name, expected, lengths[row])
    if cells.null_count:
        row = int(np.argmax(is_null(cells))) // width
        raise rows.fault(row, name, "numbers in every list", "null")
    if name == "experts":
        return _whole(rows, name, cells, width).reshape(-1, width)

    _check_numbers(rows, name, cells)
    given = values(cells)
    # 16-bit floats stay what they are: a way through 32 bits changes nothing.
    kind = np.float16 if given.dtype == np.float16 else np.float32
    # What is too large becomes infinite, which no trace takes.
    with np.errstate(over="ignore"):
        return given.astype(kind, copy=False).reshape(-1, width)


def _cells(name: str, arrays: Sequence[Any]) -> tuple[np.ndarray, Any]:
    """Length of each row's list, and the values of all lists as Arrow has them."""
    array = arrays[0]
    kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.cast(kind.value_type)
        kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        array = _split(array, "int64" if name == "experts" else "float32")
    elif pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        array = array.cast(pa.list_(kind.value_type))
    if pa.types.is_list(array.type):
        return np.diff(values(array.offsets)), flat(array)

    columns = np.stack([values(column) for column in arrays], axis=1)
    return np.full(len(array), len(arrays)), numbers(columns.reshape(-1))


def _split(array: Any, kind: str) -> Any:
    """Texts as lists of numbers; words that are none raise as Arrow does."""
    from pyarrow import compute  # noqa: PLC0415 - not every import has lists in texts

    blanks = compute.replace_substring_regex(array, r"[\[\](){}|;,\s]+", " ")
    plain = compute.utf8_trim_whitespace(blanks)
    split = compute.split_pattern(plain.cast(pa.string()), " ")
    return pa.ListArray.from_arrays(split.offsets, split.values.cast(kind))


# -- files -----------------------------------------------------------------------------


def parquet_names(path: Path) -> list[str]:
    """Return the columns of a Parquet file; none where it is no such file."""
    try:
        return list(read_schema(path).names)
    except (pa.ArrowException, OSError, ValueError):
        return []


def parquet_rows(path: Path, mapping: Mapping[str, Sequence[str]]) -> Iterator[Rows]:
    """Read the columns of a Parquet file that `mapping` has by our names."""
    names = list(dict.fromkeys(name for theirs in mapping.values() for name in theirs))
    # A name of a megabyte in every row is one name.
    schema = read_schema(path)
    texts = [name for name in names if pa.types.is_string(schema.field(name).type)]
    with open_parquet(path, encoded=texts) as file:
        yield from _rows(
            path,
            mapping,
            file.iter_batches(BATCH_ROWS, columns=names, use_threads=False),
        )


def csv_rows(
    path: Path,
    names: Sequence[str],
    mapping: Mapping[str, Sequence[str]],
    part: tuple[int, int] | None = None,
    *,
    delimiter: str = ",",
    types: Mapping[str, str] | None = None,
) -> Iterator[Rows]:
    """Read the columns of a CSV that `mapping` has by our names.

    Args:
        path: the file.
        names: all its columns, in order.
        mapping: our column -> theirs.
        part: first byte and length of the rows; of the whole file where None.
        delimiter: between the columns.
        types: column -> Arrow's name of its type; taken from the text where None, and
            then an empty field is null.

    Raises:
        TraceError: a row with more or fewer columns, or a value that is not of its
            column's type.
    """
    from pyarrow import csv  # noqa: PLC0415 - few imports need it

    used = list(dict.fromkeys(name for theirs in mapping.values() for name in theirs))
    # An empty field of a stated type is an error.
    options: dict[str, Any] = {} if types is None else {"null_values": []}
    with _part_of(path, part) as file:
        with decoding(path, "CSV"):
            batches = csv.open_csv(
                file,
                csv.ReadOptions(
                    column_names=list(names),
                    use_threads=False,
                    block_size=_INFERRED_BYTES if types is None else CSV_BYTES,
                ),
                csv.ParseOptions(delimiter=delimiter),
                csv.ConvertOptions(
                    include_columns=used,
                    column_types=types,
                    strings_can_be_null=types is None,
                    **options,
                ),
            )
        yield from _rows(path, mapping, batches)


def _part_of(path: Path, part: tuple[int, int] | None) -> Any:
    """A part of a file as a file."""
    start, length = part or (0, path.stat().st_size)
    if start + length >= path.stat().st_size:
        file = path.open("rb")
        file.seek(start)
        return file
    with pa.memory_map(str(path)) as mapped:
        return pa.BufferReader(mapped.read_buffer().slice(start, length))


def _rows(
    path: Path, mapping: Mapping[str, Sequence[str]], batches: Iterator[Any]
) -> Iterator[Rows]:
    row = 0
    while True:
        with decoding(path, f"from row {row}"):
            batch = next(batches, None)
        if batch is None:
            break
        if not batch.num_rows:
            continue
        columns = {
            ours: [batch.column(name) for name in theirs]
            for ours, theirs in mapping.items()
        }
        fault = partial(_row_fault, path, row)
        yield Rows(path, columns, batch.num_rows, fault)
        row += batch.num_rows
    if not row:
        raise layout_error(path, "rows", "at least one", "none")


def _row_fault(
    path: Path, first: int, row: int, name: str, expected: str, actual: object
) -> TraceError:
    place = f"row {first + row}: {name}"
    return layout_error(path, place, expected, quoted(actual), _WRONG_MAPPING)

"""Tables in files: rows of CSV and Parquet, some at a time."""

from __future__ import annotations

import os
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from moesim.base.inputs import quoted
from moesim.traces.format.parquet import open_parquet, read_schema
from moesim.traces.format.rows import Rows
from moesim.traces.format.sorting import BATCH_ROWS
from moesim.traces.importers.readers.foreign import decoding, layout_error
from moesim.traces.importers.readers.text import sections

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from moesim.base.errors import TraceError

# Text parsed at a time; a line must be shorter, and the first tells the types.
CSV_BYTES = 8 << 20


def parquet_names(path: Path) -> list[str]:
    """Return the columns of a Parquet file; none where it is no such file."""
    try:
        return list(read_schema(path).names)
    except (pa.ArrowException, OSError, ValueError):
        return []


def parquet_rows(path: Path, mapping: Mapping[str, Sequence[str]]) -> Iterator[Rows]:
    """Read the columns of a Parquet file that `mapping` has by our names."""
    names = _used(mapping)
    # A name of a megabyte in every row is one name.
    schema = read_schema(path)
    texts = [name for name in names if pa.types.is_string(schema.field(name).type)]
    with open_parquet(path, encoded=texts) as file:
        batches = file.iter_batches(BATCH_ROWS, columns=names, use_threads=False)
        yield from _rows(path, mapping, [batches])


def csv_rows(
    path: Path,
    names: Sequence[str],
    mapping: Mapping[str, Sequence[str]],
    *,
    header: str = "",
    start: int = 0,
    delimiter: str = ",",
) -> Iterator[Rows]:
    """Read the columns of a CSV that `mapping` has by our names.

    Args:
        path: the file.
        names: all its columns, in order.
        mapping: our column -> theirs.
        header: the line above the rows of each of the files that it was joined of.
        start: where rows begin, in a file without such lines.
        delimiter: between the columns.

    Raises:
        TraceError: a row with more or fewer columns, or a value of another kind than in
            the first rows.
    """
    from pyarrow import csv  # noqa: PLC0415 - few imports need it

    def batches(part: tuple[int, int]) -> Iterator[Any]:
        # Arrow reads ahead: a file of Python's might be asked while the process ends.
        name = os.fsencode(path)
        with (
            decoding(path, "CSV"),
            pa.OSFile(name) as file,
            file.get_stream(*part) as rows,
        ):
            yield from csv.open_csv(
                rows,
                csv.ReadOptions(
                    column_names=list(names), use_threads=False, block_size=CSV_BYTES
                ),
                csv.ParseOptions(delimiter=delimiter),
                csv.ConvertOptions(
                    include_columns=_used(mapping),
                    null_values=[""],
                    strings_can_be_null=True,
                ),
            )

    parts = [(start, path.stat().st_size - start)]
    if header:
        parts = sections(path, header.encode())
    return _rows(path, mapping, map(batches, parts))


def _used(mapping: Mapping[str, Sequence[str]]) -> list[str]:
    """All of their columns, each once."""
    return list(dict.fromkeys(chain.from_iterable(mapping.values())))


def _rows(
    path: Path, mapping: Mapping[str, Sequence[str]], files: Iterable[Iterator[Any]]
) -> Iterator[Rows]:
    """Rows of Arrow batches of joined files."""
    row = 0
    for number, batches in enumerate(files):
        while True:
            with decoding(path, f"from row {row}"):
                batch = next(batches, None)
            if batch is None:
                break
            columns = {
                ours: [batch.column(name) for name in theirs]
                for ours, theirs in mapping.items()
            }
            fault = partial(_row_fault, path, row)
            if batch.num_rows:
                yield Rows(columns, batch.num_rows, fault, number)
            row += batch.num_rows
    if not row:
        raise layout_error(path, "rows", "at least one", "none")


def _row_fault(
    path: Path, first: int, row: int, name: str, expected: str, actual: object
) -> TraceError:
    place = f"row {first + row}: {name}"
    return layout_error(path, place, expected, quoted(actual), "is the mapping right?")

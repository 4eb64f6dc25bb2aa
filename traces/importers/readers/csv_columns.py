"""Columns of stated types out of a CSV of numbers, some rows at a time, by Arrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.traces.format.parquet import values
from moesim.traces.importers.readers.foreign import decoding, layout_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np

    Block = dict[str, np.ndarray]

# Text parsed at a time; a line must be shorter.
CSV_BYTES = 1 << 20


def csv_columns(
    path: Path, names: Sequence[str], types: Mapping[str, str], skip: int
) -> Iterator[tuple[int, Block]]:
    """Read the columns that `types` names.

    Args:
        path: the file.
        names: all its columns, in order.
        types: column -> numpy's name of its type; other columns may hold anything.
        skip: lines before the first row.

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

    with path.open("rb") as file:
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

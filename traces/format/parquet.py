"""Parquet files, opened and begun as all of ours are: paths of any bytes, checksums of
pages, one thread's reads.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moesim.base import seals
from moesim.base.files import written_beside
from moesim.base.inputs import (
    MOST_ARRAY_BYTES,
    MOST_BYTES_VARIABLE,
    MOST_COLUMNS,
    check_input,
    most_bytes,
)
from moesim.base.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# Values encoded at a time. Lists are written a tenth faster than with Arrow's 1024, and
# the file is the same.
_ENCODED_VALUES = 1 << 16
# Equal texts take no space in a file, and all of it in memory.
_BATCH_ROWS = 1024


@contextmanager
def open_parquet(
    path: Path, *, encoded: Sequence[str] = ()
) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file for the time of a block; columns of texts that are `encoded`
    are read as dictionaries.

    Raises:
        OSError: no such file, or it is none.
        pyarrow.ArrowException: not Parquet, or damaged.
    """
    check_input(path)
    # As bytes: Arrow takes no text that is not UTF-8.
    with pa.OSFile(os.fsencode(path)) as source:
        file = pq.ParquetFile(
            source,
            pre_buffer=False,
            page_checksum_verification=True,
            read_dictionary=list(encoded),
        )
        if file.metadata.num_columns > MOST_COLUMNS:
            reason = f"expected at most {MOST_COLUMNS:,} columns, found more"
            raise OSError(errno.EFBIG, reason, str(path))
        yield file


def read_table(file: pq.ParquetFile, path: Path, columns: Any = None) -> pa.Table:
    """Read a table that is held as a whole.

    Args:
        file: opened.
        path: of it, for errors.
        columns: names of those to be read; None reads all.

    Raises:
        OSError: it is larger, unpacked, than what is held.
        pyarrow.ArrowException: damaged.
    """
    most = max(MOST_ARRAY_BYTES, most_bytes())
    batches = []
    size = 0
    for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
        batches.append(batch)
        size += batch.nbytes
        if size > most:
            reason = (
                f"expected at most {format_bytes(most)} unpacked, found more;"
                f" {MOST_BYTES_VARIABLE} raises the limit"
            )
            raise OSError(errno.EFBIG, reason, str(path))
    schema = batches[0].schema if batches else file.schema_arrow
    if columns is not None and not batches:
        schema = pa.schema([schema.field(name) for name in columns])
    return pa.Table.from_batches(batches, schema)


def read_schema(path: Path) -> pa.Schema:
    """Return the columns and metadata of a Parquet file.

    Raises:
        OSError, pyarrow.ArrowException: as `open_parquet`.
    """
    with open_parquet(path) as file:
        return file.schema_arrow


def read_metadata(path: Path) -> dict[bytes, bytes]:
    """Return what the footer of a Parquet file says beside its columns; the schema does
    not have what was added while rows were written.

    Raises:
        OSError, pyarrow.ArrowException: as `open_parquet`.
    """
    with open_parquet(path) as file:
        return dict(file.metadata.metadata or {})


@contextmanager
def sealed_writer(
    path: Path, schema: pa.Schema, **options: Any
) -> Iterator[pq.ParquetWriter]:
    """Yield a writer of a Parquet file; at the end of the block the file is sealed.

    Args:
        path: where to write; the caller gives it its name, see `moesim.base.files`.
        schema: of its tables.
        options: of `pyarrow.parquet.ParquetWriter`.
    """
    with path.open("wb") as sink:
        writer = pq.ParquetWriter(
            sink,
            schema,
            write_page_checksum=True,
            write_batch_size=_ENCODED_VALUES,
            **options,
        )
        try:
            yield writer
            seals.reserve(writer)
            writer.close()
        except BaseException:
            # Arrow would try again, and complain, when it forgets the writer.
            writer.is_open = False
            raise
    seals.seal(path)


def write_table(path: Path, table: pa.Table, **options: Any) -> None:
    """Write a table as one sealed Parquet file, or none.

    Args:
        path: of the file.
        table: what is in it.
        options: of `pyarrow.parquet.ParquetWriter`.
    """
    with (
        written_beside(path) as part,
        sealed_writer(part, table.schema, **options) as writer,
    ):
        writer.write_table(table)


# -- arrow -----------------------------------------------------------------------------
# Arrow arrays straight from numpy buffers.
#
# `pyarrow.array` and `Array.to_numpy` import pandas to ask about it: a quarter of a
# second and 40 MB that a replay does not need.


def numbers(array: np.ndarray) -> pa.Array:
    """Return one-dimensional integers or floats as Arrow, without a copy where they are
    contiguous.
    """
    # A column of a matrix has gaps, which a buffer cannot have.
    array = np.ascontiguousarray(array)
    # No validity bitmap: nothing is null.
    buffers = [None, pa.py_buffer(array)]
    return pa.Array.from_buffers(pa.from_numpy_dtype(array.dtype), len(array), buffers)


def values(array: Any) -> np.ndarray:
    """Undo `numbers`: return a read-only view of an Arrow array of integers or floats
    without nulls.
    """
    dtype = np.dtype(array.type.to_pandas_dtype())
    data = array.buffers()[1]
    # A slice keeps the buffer of the whole array.
    return np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)


def lists(matrix: np.ndarray) -> pa.Array:
    """Return the rows of a matrix as lists of equal length."""
    offsets = np.arange(0, matrix.size + 1, matrix.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(numbers(offsets), numbers(matrix.reshape(-1)))


def flat(array: Any) -> pa.Array:
    """Return the values of all lists of a list array, one list after the other.

    `flatten` would import pyarrow.compute.
    """
    offsets = values(array.offsets)
    first = int(offsets[0])
    count = int(offsets[-1] - offsets[0])
    return array.values.slice(first, count)


def named(codes: np.ndarray, names: Sequence[str]) -> pa.Array:
    """Return codes int8 and the names behind them as a dictionary array."""
    data = [name.encode() for name in names]
    offsets = np.cumsum([0, *map(len, data)]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(data))]
    dictionary = pa.Array.from_buffers(pa.string(), len(data), buffers)
    return pa.DictionaryArray.from_arrays(numbers(codes), dictionary)


def codes(column: Any, names: Sequence[str]) -> np.ndarray:
    """Undo `named`, whatever order the file keeps its names in: int8, -1 for a name
    that is not known.
    """
    # Other writers keep plain strings.
    if not isinstance(column, pa.DictionaryArray):
        column = column.dictionary_encode()

    code_of = {name: code for code, name in enumerate(names)}
    known = [code_of.get(name, -1) for name in column.dictionary.to_pylist()]
    by_entry = np.array(known, dtype=np.int8)
    return np.asarray(by_entry[values(column.indices)])


def batches_of(relation: Any, rows: int) -> Any:
    """Return a relation of DuckDB as Arrow batches of about so many rows."""
    # Older versions of DuckDB name it otherwise.
    read = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader
    return read(rows)

"""Arrow arrays straight from numpy buffers.

`pyarrow.array` and `Array.to_numpy` import pandas to ask about it: a quarter of a
second and 40 MB that a replay does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    offsets = np.arange(
        0,
        matrix.size + 1,
        matrix.shape[1],
        dtype=np.int32,
    )
    return pa.ListArray.from_arrays(numbers(offsets), numbers(matrix.reshape(-1)))


def flat(array: Any) -> pa.Array:
    """Return the values of all lists of a list array, one list after the other.

    `flatten` would import pyarrow.compute.
    """
    offsets = values(array.offsets)
    first = int(offsets[0])
    count = int(offsets[-1] - offsets[0])
    return array.values.slice(first, count)


def named(
    codes: np.ndarray,
    names: Sequence[str],
) -> pa.Array:
    """Return codes int8 and the names behind them as a dictionary array."""
    data = [name.encode() for name in names]
    offsets = np.cumsum([0, *map(len, data)]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(data))]
    dictionary = pa.Array.from_buffers(pa.string(), len(data), buffers)
    return pa.DictionaryArray.from_arrays(numbers(codes), dictionary)


def codes(
    column: Any,
    names: Sequence[str],
) -> np.ndarray:
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

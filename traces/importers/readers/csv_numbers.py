"""CSV of numbers in columns of known types, some rows at a time: by `alike`, or by
Arrow where a row is odd.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from moesim.traces.importers.readers.column_cast import whole_numbers
from moesim.traces.importers.readers.foreign import bad, decoding, line_chunks
from moesim.traces.importers.readers.number_scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from moesim.traces.importers.readers.number_scanner import Lines

    Block = dict[str, np.ndarray]


def number_columns(
    path: Path, names: Sequence[str], types: Mapping[str, str], skip: int
) -> Iterator[tuple[int, Block]]:
    """The columns that `types` names, with the number of their first row, from 0.

    Args:
        path: the file.
        names: all its columns, in order.
        types: numpy's names of the types of the wanted ones; others may hold anything.
        skip: lines before the first row.

    Raises:
        TraceError: a row with more or fewer columns, an empty value, or one that is not
            of its column's type.
    """
    scanner = Scanner(words=True)
    base = 0
    for number, data in line_chunks(path, skip=skip):
        lines = scanner.scan(data)
        block = None if lines is None else _at_once(lines, names, types)
        if block is None:
            block = _by_arrow(path, number, data, names, types)
        rows = len(next(iter(block.values())))
        if rows:
            yield base, block
        base += rows


def _at_once(
    lines: Lines, names: Sequence[str], types: Mapping[str, str]
) -> Block | None:
    """The columns of lines that are all alike; None where they are not, or a value is
    not of its type.
    """
    forms = lines.forms()
    if len(forms) != 1:
        return None
    alike = forms[0]
    words = lines.filled(0).rstrip(b"\r\n").split(b",")
    due = [(b"%d" % column, b"%d" % ~column) for column in range(len(names))]
    if len(words) != len(due) or any(
        word not in two for word, two in zip(words, due, strict=True)
    ):
        return None
    wanted = {
        column: np.dtype(types[name])
        for column, name in enumerate(names)
        if name in types
    }
    by_column: dict[int, np.ndarray] = {}
    for kind in set(wanted.values()):
        columns = [column for column, dtype in wanted.items() if dtype == kind]
        if kind.kind == "i":
            limits = np.iinfo(kind)
            least, most = (
                np.full(len(columns), float(limit))
                for limit in (limits.min, limits.max)
            )
            values = np.empty((len(columns), len(alike.number)), kind)
            if not whole_numbers(
                alike.number, alike.whole, np.array(columns), least, most, values.T
            ):
                return None
        elif any(words[column].startswith(b"-") for column in columns):
            return None  # words such as nan
        else:
            values = alike.number.T[columns].astype(kind)
        by_column |= zip(columns, values, strict=True)
    return {names[column]: by_column[column] for column in wanted}


def _by_arrow(
    path: Path, number: int, data: bytes, names: Sequence[str], types: Mapping[str, str]
) -> Block:
    """The same for any lines; what is wrong is told."""
    from pyarrow import csv  # noqa: PLC0415 - few imports need it

    wanted = [name for name in names if name in types]
    with decoding(path, f"CSV from line {number}"):
        if not data.strip():
            return {name: np.empty(0, types[name]) for name in wanted}
        table = csv.read_csv(
            pa.BufferReader(data),
            read_options=csv.ReadOptions(
                column_names=names, use_threads=False, block_size=len(data) + 1
            ),
            convert_options=csv.ConvertOptions(
                include_columns=wanted,
                column_types={name: types[name] for name in wanted},
                null_values=[],
                strings_can_be_null=False,
            ),
        )
        if any(table.column(name).null_count for name in wanted):
            raise bad(
                path,
                f"rows from line {number}",
                "values in every column",
                "empty values",
            )
        return {
            name: np.asarray(table.column(name).combine_chunks()) for name in wanted
        }

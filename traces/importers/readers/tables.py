"""Tables in files: rows of Parquet, CSV and lines of JSON, some at a time."""

from __future__ import annotations

import functools
import glob
import json
import os
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from moesim.base.inputs import MOST_LINE_BYTES, quoted
from moesim.traces.format.parquet import batches_of, open_parquet, read_schema, values
from moesim.traces.format.rows import Rows
from moesim.traces.format.sorting import BATCH_ROWS
from moesim.traces.importers.readers.foreign import (
    decoding,
    filled,
    head,
    layout_error,
    sections,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np

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


# -- lines of JSON ---------------------------------------------------------------------
#
# A *structure* says which keys are wanted and what they hold, as DuckDB's
# ``json_transform`` takes it: ``{"pos": "DOUBLE", "experts": ["DOUBLE"]}``. A key that
# a line does not have, or whose value is of another kind, is null there.
#
# Numbers are asked for as ``DOUBLE``: DuckDB rounds 0.5 where an integer is asked for.
# It is more lenient than JSON in two ways: a number in quotes is that number, and a
# comma may follow the last value.

# DuckDB returns so many rows at a time, fewer of long lines.
JSON_ROWS = 16_384
_JSON_BYTES = 32 << 20


def json_rows(
    path: Path,
    structure: Any,
    columns: Mapping[str, str],
    *,
    each: str = "",
    where: str = "true",
    needed: str = "a value in every row",
    skip: int = 0,
    held: Sequence[bytes] | None = None,
) -> Iterator[Rows]:
    """Read rows of lines, some at a time; lines that are blank have none.

    Args:
        path: the file.
        structure: what is wanted of a line.
        columns: our column -> an expression in SQL over ``line``, its ``number`` from
            0, and ``each`` and ``turn``.
        each: a list of the line with a row for each value: ``each`` is that value, and
            ``turn`` counts from 1. A line without values has one row, which is null.
        where: which lines count, in SQL.
        needed: what a row must have; without it, a column is null.
        skip: how many of the first lines that are not blank are left out.
        held: the lines, where they are in memory; none of them is blank.

    Raises:
        TraceError: DuckDB cannot read it, or a line is longer than `MOST_LINE_BYTES`.
    """
    import duckdb  # noqa: PLC0415 - a tenth of a second that only JSON pays

    # Another query would end this one, so it has a connection of its own.
    cursor = _connection().cursor()
    if held is not None:
        cursor.register("held", pa.table({"line": pa.array(held, pa.large_string())}))
    lines = _of_file(path, structure) if held is None else _of_held(structure)
    rows = f"""
        SELECT number, line, unnest(coalesce(nullif({each}, []), [NULL])) AS each,
            unnest(range(1, 1 + greatest(1, coalesce(len({each}), 0)))) AS turn
        FROM lines
    """  # noqa: S608 - names and texts are quoted
    selected = [f"{text} AS {quote(name)}" for name, text in columns.items()]
    query = f"""
        WITH lines AS (SELECT row_number() OVER () - 1 AS number, line FROM {lines}),
            rows AS ({rows if each else "FROM lines"})
        SELECT number, {", ".join(selected)} FROM rows
        WHERE number >= {skip} AND ({where})
    """  # noqa: S608

    start = head(path)
    fitting = _JSON_BYTES * start.count(b"\n") // max(1, len(start))
    place = 0
    try:
        for batch in batches_of(cursor.sql(query), min(max(1, fitting), JSON_ROWS)):
            number = values(batch.column("number"))
            arrays = {name: [batch.column(name)] for name in columns}
            fault = partial(_line_fault, path, held, number)
            yield Rows(arrays, len(number), fault, needed=needed)
            place = number[-1]
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        behind = f"lines behind line {place}"
        expected = f"JSON in lines of up to {MOST_LINE_BYTES >> 20} MiB"
        reason = " ".join(str(error).split())
        raise layout_error(path, behind, expected, reason) from None


@functools.cache
def _connection() -> Any:
    """A database in memory, kept open: opening one takes longer than a small file."""
    import duckdb  # noqa: PLC0415 - as above

    # Extensions would be fetched from the network.
    return duckdb.connect(config={"autoinstall_known_extensions": False, "threads": 1})


def _of_file(path: Path, structure: Any) -> str:
    """What the lines of a file hold, as a table with one column."""
    # What looks like a pattern is the name of a file here. A line that is not JSON is
    # null; a suffix or a folder's name says nothing.
    return f"""
        read_json(
            {quote(glob.escape(str(path.absolute())), "'")},
            columns = {{line: {quote(_sql_type(structure), "'")}}},
            format = 'newline_delimited',
            records = false,
            ignore_errors = true,
            maximum_object_size = {MOST_LINE_BYTES},
            compression = 'none',
            hive_partitioning = false
        )
    """


def _of_held(structure: Any) -> str:
    """The same of lines in memory."""
    kind = quote(json.dumps(structure), "'")
    return f"(SELECT json_transform(line, {kind}) AS line FROM held)"  # noqa: S608


def quote(text: str, mark: str = '"') -> str:
    """Return a name, or a text between other marks, as SQL has it."""
    return f"{mark}{text.replace(mark, 2 * mark)}{mark}"


def _sql_type(structure: Any) -> str:
    """The type of what a structure describes."""
    if isinstance(structure, list):
        return f"{_sql_type(structure[0])}[]"
    if isinstance(structure, dict):
        fields = [f"{quote(key)} {_sql_type(kind)}" for key, kind in structure.items()]
        return f"STRUCT({', '.join(fields)})"
    return str(structure)


def _line_fault(
    path: Path,
    held: Sequence[bytes] | None,
    number: np.ndarray,
    row: int,
    name: str,
    expected: str,
    actual: object,
) -> TraceError:
    """The error of a row, whose line is quoted."""
    del actual
    line = int(number[row])
    if held is not None:
        place, text = 1 + line, held[line]
    else:
        with path.open("rb") as file:
            place, text = next(islice(filled(file), line, None))
    with decoding(path, f"line {place}: {name}"):
        json.loads(text)
    quote = quoted(text.decode(errors="replace").strip(), 120)
    return layout_error(path, f"line {place}: {name}", expected, quote)

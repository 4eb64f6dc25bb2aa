"""Lines of JSON as rows of stated types, parsed and unnested by DuckDB.

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
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from moesim.base.inputs import MOST_LINE_BYTES, quoted
from moesim.traces.format.parquet import batches_of, values
from moesim.traces.format.rows import Rows
from moesim.traces.importers.readers.foreign import decoding, head, layout_error
from moesim.traces.importers.readers.text import filled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np

    from moesim.base.errors import TraceError

# DuckDB returns so many rows at a time, fewer of long lines.
BATCH_ROWS = 16_384
_BATCH_BYTES = 32 << 20


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
    fitting = _BATCH_BYTES * start.count(b"\n") // max(1, len(start))
    place = 0
    try:
        for batch in batches_of(cursor.sql(query), min(max(1, fitting), BATCH_ROWS)):
            number = values(batch.column("number"))
            arrays = {name: [batch.column(name)] for name in columns}
            fault = partial(_fault, path, held, number)
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


def _fault(
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

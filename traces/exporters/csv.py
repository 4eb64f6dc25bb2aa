"""CSV: seq, pos, phase, layer, e0 … eK-1, and w0 … wK-1 and token where the trace has
them; comes back by `columns`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyarrow import csv

from moesim.base.files import written_beside
from moesim.traces.format.parquet import named, numbers
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from moesim.traces.format.reader import SequenceRows, Trace

SUFFIX = ".csv"
# Rows written at a time: a sequence may be longer than memory would like as text.
_ROWS = 1 << 18


def export(trace: Trace, out: Path, progress: Callable[[int], None]) -> int:
    """Write one line per token and layer, in trace order."""
    optional = [name for name in ("weights", "token") if name in trace.columns]
    schema = _schema(trace.shape.top_k, optional)
    # pyarrow would quote the names of the header.
    plain = csv.WriteOptions(include_header=False, quoting_style="none")
    written = 0

    with (
        written_beside(out) as part,
        part.open("wb") as file,
        csv.CSVWriter(file, schema, write_options=plain) as writer,
    ):
        file.write(",".join(schema.names).encode() + b"\n")
        for rows in trace.sequences(optional):
            for table in _tables(rows, schema):
                writer.write_table(table)
                written += table.num_rows
                progress(written)

    return written


def _schema(top_k: int, optional: Sequence[str]) -> pa.Schema:
    fields = [
        ("seq", pa.int32()),
        ("pos", pa.int32()),
        ("phase", pa.string()),
        ("layer", pa.int16()),
    ]
    fields += [(f"e{rank}", pa.uint16()) for rank in range(top_k)]
    if "weights" in optional:
        # Arrow writes no 16-bit floats as text.
        fields += [(f"w{rank}", pa.float32()) for rank in range(top_k)]
    if "token" in optional:
        fields.append(("token", pa.int32()))
    return pa.schema(fields)


def _tables(rows: SequenceRows, schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of one sequence, some at a time."""
    phases = [phase.label for phase in Phase]

    for start in range(0, len(rows.pos), _ROWS):
        part = slice(start, start + _ROWS)
        columns = [
            numbers(np.full(len(rows.pos[part]), rows.seq, np.int32)),
            numbers(rows.pos[part]),
            named(rows.phase[part], phases).cast(pa.string()),
            numbers(rows.layer[part]),
        ]
        columns += [numbers(ids) for ids in rows.experts[part].T]
        if "weights" in rows.columns:
            weights = rows.columns["weights"][part].astype(np.float32)
            columns += [numbers(column) for column in weights.T]
        if "token" in rows.columns:
            columns.append(numbers(rows.columns["token"][part]))

        yield pa.Table.from_arrays(columns, schema=schema)

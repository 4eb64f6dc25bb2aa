"""CSV: seq, pos, phase, layer, e0 … eK-1, and w0 … wK-1 and token where the trace has
them; comes back by `columns`.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyarrow import csv

from moesim.base.files import written_beside
from moesim.traces.format.parquet import named, numbers
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from moesim.traces.format.reader import SequenceRows, Trace

    Columns = dict[str, pa.Array]

SUFFIX = ".csv"
# Rows written at a time: a sequence may be longer than memory would like as text.
_ROWS = 1 << 18


def export(trace: Trace, out: Path, progress: Callable[[int], None]) -> int:
    """Write one line per token and layer, in trace order."""
    optional = [name for name in ("weights", "token") if name in trace.columns]
    written = 0
    with csv_file(out, has_header=True) as write:
        for rows in trace.sequences(optional):
            for start in range(0, len(rows.pos), _ROWS):
                part = slice(start, start + _ROWS)
                write(_columns(rows, part))
                written += len(rows.pos[part])
                progress(written)
    return written


def _columns(rows: SequenceRows, part: slice) -> Columns:
    """Some rows of one sequence."""
    experts = rows.experts[part]
    columns = {
        "seq": numbers(np.full(len(experts), rows.seq, np.int32)),
        "pos": numbers(rows.pos[part]),
        "phase": named(rows.phase[part], [each.label for each in Phase]).cast("string"),
        "layer": numbers(rows.layer[part]),
    }
    columns |= {f"e{rank}": numbers(ids) for rank, ids in enumerate(experts.T)}
    if "weights" in rows.columns:
        # Arrow writes no 16-bit floats as text.
        weights = rows.columns["weights"][part].astype(np.float32)
        columns |= {f"w{rank}": numbers(each) for rank, each in enumerate(weights.T)}
    if "token" in rows.columns:
        columns["token"] = numbers(rows.columns["token"][part])
    return columns


@contextmanager
def csv_file(out: Path, *, has_header: bool) -> Iterator[Callable[[Columns], None]]:
    """Write a CSV, which appears when it is whole; gives what appends rows to it."""
    # pyarrow would quote the names of the header.
    plain = csv.WriteOptions(include_header=False, quoting_style="none")
    writer = None
    with ExitStack() as stack:
        part = stack.enter_context(written_beside(out))
        file = stack.enter_context(part.open("wb"))

        def write(columns: Columns) -> None:
            nonlocal writer
            table = pa.Table.from_arrays(list(columns.values()), list(columns))
            if writer is None:
                if has_header:
                    file.write(",".join(columns).encode() + b"\n")
                lines = csv.CSVWriter(file, table.schema, write_options=plain)
                writer = stack.enter_context(lines)
            writer.write_table(table)

        yield write

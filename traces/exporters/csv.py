"""CSV: seq, pos, phase, layer, e0 … eK-1, and w0 … wK-1 and token where the trace has
them; comes back by `columns`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
from moesim.traces.files import written_beside
from moesim.traces.format.arrow import named, numbers
from moesim.traces.format.schema import Phase
from pyarrow import csv

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.traces.format.reader import Trace

SUFFIX = ".csv"
_ROWS = 1 << 18


def export(trace: Trace, out: Path, progress: Callable[[int], None]) -> int:
    """Write one line per token and layer, in trace order."""
    wanted = [name for name in ("weights", "token") if name in trace.columns]
    top_k = trace.shape.top_k
    written = 0
    lists = {"e": pa.uint16(), **({"w": pa.float32()} if "weights" in wanted else {})}
    fields = [
        ("seq", pa.int32()),
        ("pos", pa.int32()),
        ("phase", pa.string()),
        ("layer", pa.int16()),
    ]
    fields += [
        (f"{letter}{place}", kind)
        for letter, kind in lists.items()
        for place in range(top_k)
    ]
    schema = pa.schema(fields + ([("token", pa.int32())] if "token" in wanted else []))
    plain = csv.WriteOptions(include_header=False, quoting_style="none")
    with (
        written_beside(out) as part,
        part.open("wb") as file,
        csv.CSVWriter(file, schema, write_options=plain) as writer,
    ):
        file.write(",".join(schema.names).encode() + b"\n")
        for rows in trace.sequences(wanted):
            tables = {"e": rows.experts} | (
                {"w": rows.columns["weights"].astype("f4")}
                if "weights" in wanted
                else {}
            )
            for start in range(0, len(rows.pos), _ROWS):
                cut = slice(start, start + _ROWS)
                phase = named(rows.phase[cut], [phase.label for phase in Phase]).cast(
                    pa.string()
                )
                count = len(phase)
                columns = [
                    numbers(rows.pos[cut] * 0 + rows.seq),
                    numbers(rows.pos[cut]),
                    phase,
                    numbers(rows.layer[cut]),
                ]
                columns += [
                    numbers(tables[letter][cut, place])
                    for letter in lists
                    for place in range(top_k)
                ]
                columns += (
                    [numbers(rows.columns["token"][cut])] if "token" in wanted else []
                )
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
                written += count
                progress(written)
    return written

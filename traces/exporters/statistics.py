"""The statistics of a trace as Parquet: one row per layer, one column per figure;
single numbers in the metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.traces.format.parquet import write_table
from moesim.traces.stats.trace_summary import layer_table, summarise_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.traces.format.reader import Trace

SUFFIX = ".parquet"


def export(trace: Trace, out: Path, progress: Callable[[int], None]) -> int:
    """Write ``layers.parquet`` of `moesim.traces.stats.trace_summary.write_tables`."""
    table = layer_table(trace, summarise_trace(trace))
    write_table(out, table)
    progress(table.num_rows)
    return int(table.num_rows)

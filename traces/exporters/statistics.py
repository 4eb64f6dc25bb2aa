"""The statistics of a trace as Parquet: one row per layer, one column per figure;
single numbers in the metadata.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from moesim.traces.files import written_beside
from moesim.traces.stats.statistics import stats

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.traces.format.reader import Trace

SUFFIX = ".parquet"


def export(trace: Trace, out: Path, progress: Callable[[int], None]) -> int:
    """Write what `moesim.traces.stats.statistics.stats` finds; a table of figures by
    ratio becomes columns such as ``lru_0.25``.
    """
    found = stats(trace)
    columns, single = split(found, trace.shape.layers)
    table = pa.table({"layer": list(range(trace.shape.layers)), **columns})
    told = json.dumps(
        {"trace": trace.path.name, "model": trace.shape.name, **single}, sort_keys=True
    )
    with written_beside(out) as part:
        pq.write_table(table.replace_schema_metadata({"statistics": told}), part)
    progress(table.num_rows)
    return int(table.num_rows)


def split(
    found: dict[str, Any], layers: int
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Figures by layer, and all others."""
    columns: dict[str, list[Any]] = {}
    single: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            inner, rest = split(
                {f"{name}_{key}": one for key, one in value.items()}, layers
            )
            columns |= inner
            single |= rest
        elif isinstance(value, list) and len(value) == layers:
            columns[name] = value
        else:
            single[name] = value
    return columns, single

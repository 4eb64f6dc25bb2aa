"""The statistics of a trace as Parquet: one row per layer, one column per figure;
single numbers in the metadata.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from moesim.traces.format.parquet import write_table
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
    layers = trace.shape.layers
    by_layer, single = split(stats(trace), layers)
    table = pa.table({"layer": list(range(layers)), **by_layer})

    # Under one key, so that other tools need not know which figures there are.
    described = {"trace": trace.path.name, "model": trace.shape.name, **single}
    metadata = {"statistics": json.dumps(described, sort_keys=True)}
    write_table(out, table.replace_schema_metadata(metadata))

    progress(table.num_rows)
    return int(table.num_rows)


def split(
    figures: dict[str, Any], layers: int
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Return figures by layer, and all others."""
    by_layer: dict[str, list[Any]] = {}
    single: dict[str, Any] = {}

    for name, value in figures.items():
        if isinstance(value, dict):
            # Parquet columns have flat names.
            nested = {f"{name}_{key}": figure for key, figure in value.items()}
            nested_by_layer, nested_single = split(nested, layers)
            by_layer |= nested_by_layer
            single |= nested_single
        elif isinstance(value, list) and len(value) == layers:
            by_layer[name] = value
        else:
            single[name] = value

    return by_layer, single

"""The statistics of a trace as Parquet tables, for notebooks and other tools."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from moesim.traces.format.parquet import write_table

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.traces.format.reader import Trace
    from moesim.traces.stats.hit_rate_curves import Curves
    from moesim.traces.stats.trace_summary import TraceSummary

_PHASES = ("prefill", "decode")
_BY_LAYER = (
    "active",
    "active_prefill",
    "entropy_bits",
    "max_share",
    "overlap",
    "working_set",
    "touched",
    "similarity_by_layer",
)
# Figures by size of the cache have a table of their own.
_CURVES = ("curve_decode", "curve_all")


def write_tables(
    trace: Trace,
    summary: TraceSummary,
    folder: Path,
) -> list[Path]:
    """Write what `summarise_trace` found.

    Returns:
        ``layers.parquet`` one row per layer; ``load.parquet`` layer, expert, tokens in
        decode; ``curves.parquet`` slots per layer with hits and accesses by phase,
        layer and policy; ``global.parquet`` the same for one shared cache; each with
        the other figures as JSON under the metadata key ``statistics``.
    """
    shape = summary.shape
    by_layer = {
        name: values
        for name, values in _by_layer(summary.figures).items()
        if len(values) == shape.layers
    }
    load = {
        "layer": np.repeat(np.arange(shape.layers), shape.experts),
        "expert": np.tile(np.arange(shape.experts), shape.layers),
        "tokens": summary.load.reshape(-1),
    }
    tables = {
        "layers": {"layer": np.arange(shape.layers), **by_layer},
        "load": load,
        "curves": _per_layer_curves(summary.curves),
        "global": _global_curves(summary.curves),
    }

    single = {
        name: value
        for name, value in summary.figures.items()
        if name not in (*by_layer, *_CURVES)
    }
    described = {"trace": trace.path.name, "model": shape.name, **single}
    metadata = {"statistics": json.dumps(described, sort_keys=True)}

    paths = []
    for name, columns in tables.items():
        path = folder / f"{name}.parquet"
        # One table at a time appears; a notebook never meets half of one.
        write_table(path, pa.table(columns).replace_schema_metadata(metadata))
        paths.append(path)
    return paths


def _per_layer_curves(curves: Curves) -> dict[str, np.ndarray]:
    """A row per phase, layer and number of slots."""
    # Both policies have the same shape.
    phases, layers, sizes = curves.lru.shape
    accesses = [
        np.repeat(curves.accesses("lru", phase), sizes) for phase in range(phases)
    ]

    columns = {
        "phase": np.repeat(_PHASES, layers * sizes),
        "layer": np.tile(np.repeat(np.arange(layers), sizes), phases),
        "slots": np.tile(np.arange(sizes), phases * layers),
        "accesses": np.concatenate(accesses),
    }
    for name in ("lru", "belady"):
        hits = [curves.hits(name, phase).reshape(-1) for phase in range(phases)]
        columns[name] = np.concatenate(hits)
    return columns


def _global_curves(curves: Curves) -> dict[str, np.ndarray]:
    """A row per phase and number of slots, of one cache for all layers."""
    phases, sizes = curves.lru_global.shape
    accesses = [int(curves.accesses("lru_global", phase)) for phase in range(phases)]

    columns = {
        "phase": np.repeat(_PHASES, sizes),
        "slots": np.tile(np.arange(sizes), phases),
        "accesses": np.repeat(accesses, sizes),
    }
    for name in ("lru", "belady"):
        hits = [curves.hits(f"{name}_global", phase) for phase in range(phases)]
        columns[name] = np.concatenate(hits)
    return columns


def _by_layer(figures: dict[str, Any]) -> dict[str, list[Any]]:
    """Lists with one entry per layer, under flat names."""
    columns = {name: figures[name] for name in _BY_LAYER}
    for ratio, values in figures["lru"].items():
        columns[f"lru_{ratio}"] = values
    for length, values in figures["consistency"].items():
        columns[f"consistency_{length}"] = values

    information = figures["information_bits"]
    if information is not None:
        # Nothing follows the last layer.
        columns["information_bits_to_next"] = [*information, None]
    for name, accuracy in (figures["prediction"] or {}).items():
        columns[f"{name}_accuracy"] = accuracy["by_layer"]

    return {name: values for name, values in columns.items() if values is not None}

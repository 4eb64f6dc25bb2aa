"""The statistics of a trace as Parquet tables, for notebooks and other tools."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from moesim.traces.files import written_beside

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.traces.format.reader import Trace
    from moesim.traces.stats.trace_summary import Survey


def write_tables(trace: Trace, found: Survey, folder: Path) -> list[Path]:
    """Write what `survey` found.

    Returns:
        ``layers.parquet`` one row per layer; ``load.parquet`` layer, expert, tokens in
        decode; ``curves.parquet`` slots per layer with hits and accesses by phase,
        layer and policy; ``global.parquet`` the same for one shared cache; each with
        the other figures as JSON under the metadata key ``statistics``.
    """
    figures = found.figures
    shape = found.shape
    layers = shape.layers
    experts = shape.experts
    columns = {
        name: values for name, values in _by_layer(figures) if len(values) == layers
    }
    per_layer = {"layer": np.arange(layers), **columns}
    single = {
        name: value
        for name, value in figures.items()
        if name not in (*columns, "curve_decode", "curve_all")
    }
    load = {
        "layer": np.repeat(np.arange(layers), experts),
        "expert": np.tile(np.arange(experts), layers),
        "tokens": found.load.reshape(-1),
    }
    phases = 2
    sizes = experts + 1
    curves = {
        "phase": np.repeat(["prefill", "decode"], layers * sizes),
        "layer": np.tile(np.repeat(np.arange(layers), sizes), phases),
        "slots": np.tile(np.arange(sizes), phases * layers),
        "accesses": np.concatenate(
            [np.repeat(found.curves.accesses("lru", p), sizes) for p in range(phases)]
        ),
    }
    curves |= {
        name: np.concatenate(
            [found.curves.hits(name, p).reshape(-1) for p in range(phases)]
        )
        for name in ("lru", "belady")
    }
    slots = layers * experts + 1
    shared = {
        "phase": np.repeat(["prefill", "decode"], slots),
        "slots": np.tile(np.arange(slots), phases),
        "accesses": np.repeat(
            [int(found.curves.accesses("lru_global", p)) for p in range(phases)], slots
        ),
    }
    shared |= {
        name: np.concatenate(
            [found.curves.hits(f"{name}_global", p) for p in range(phases)]
        )
        for name in ("lru", "belady")
    }
    told = json.dumps(
        {"trace": trace.path.name, "model": shape.name, **single}, sort_keys=True
    )
    paths = []
    for name, table in (
        ("layers", per_layer),
        ("load", load),
        ("curves", curves),
        ("global", shared),
    ):
        paths.append(folder / f"{name}.parquet")
        with written_beside(paths[-1]) as part:
            pq.write_table(
                pa.table(table).replace_schema_metadata({"statistics": told}), part
            )
    return paths


def _by_layer(figures: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """Lists with one entry per layer, under flat names."""
    names = (
        "active",
        "active_prefill",
        "entropy_bits",
        "max_share",
        "overlap",
        "working_set",
        "touched",
    )
    found = [(name, figures[name]) for name in (*names, "similarity_by_layer")]
    found += [(f"lru_{ratio}", values) for ratio, values in figures["lru"].items()]
    found += [
        (f"consistency_{length}", values)
        for length, values in figures["consistency"].items()
    ]
    if figures["information_bits"] is not None:
        found.append(("information_bits_to_next", [*figures["information_bits"], None]))
    for name, told in (figures["prediction"] or {}).items():
        found.append((f"{name}_accuracy", told["by_layer"]))
    return [(name, values) for name, values in found if values is not None]

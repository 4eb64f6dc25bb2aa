"""A moesim trace whose rows lie in any order: what it says about itself stays as it is,
its rows are sorted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from moesim.traces.format.schema import (
    METADATA_KEY,
    OPTIONAL_COLUMNS,
    REQUIRED_COLUMNS,
    ModelShape,
    TraceHeader,
)
from moesim.traces.importers import columns
from moesim.traces.importers.readers.foreign import bad

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.traces.format.sorting import Unordered


def recognises(path: Path) -> bool:
    """Whether this is Parquet with our header and columns."""
    try:
        found = pq.read_schema(path)
    except (pa.ArrowException, OSError, ValueError):
        return False
    return METADATA_KEY in (found.metadata or {}) and set(REQUIRED_COLUMNS) <= set(
        found.names
    )


def header(path: Path, shape: ModelShape | None) -> TraceHeader:
    """The trace's own.

    Raises:
        TraceError: damaged, or `shape` is another model.
    """
    found = TraceHeader.from_json(
        pq.read_schema(path).metadata[METADATA_KEY], where=str(path)
    )
    for name in ("layers", "experts") if shape is not None else ():
        if getattr(shape, name) != getattr(found.shape, name):
            words = (
                f"{getattr(found.shape, name)} as in the header ({found.shape.name})"
            )
            raise bad(
                path,
                f"shape: {name}",
                words,
                getattr(shape, name),
                "leave the shape out: the trace has its own",
            )
    return found


def read(path: Path, shape: ModelShape) -> Unordered:
    """All columns that a trace may have."""
    names = pq.read_schema(path).names
    found = {
        name: [name] for name in (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS) if name in names
    }
    return columns.unordered(path, shape, found)

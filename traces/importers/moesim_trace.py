"""A moesim trace whose rows lie in any order: what it says about itself stays as it is,
its rows are sorted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from moesim.base.seals import check_seal
from moesim.traces.format.parquet import read_schema
from moesim.traces.format.schema import (
    METADATA_KEY,
    OPTIONAL_COLUMNS,
    REQUIRED_COLUMNS,
    ModelShape,
    TraceHeader,
)
from moesim.traces.importers import columns
from moesim.traces.importers.readers.foreign import layout_error

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.traces.format.sorting import Unordered


def recognises(path: Path) -> bool:
    """Whether this is Parquet with our header and columns."""
    try:
        schema = read_schema(path)
    except (pa.ArrowException, OSError, ValueError):
        return False

    has_header = METADATA_KEY in (schema.metadata or {})
    return has_header and set(REQUIRED_COLUMNS) <= set(schema.names)


def header(path: Path, shape: ModelShape | None) -> TraceHeader:
    """The trace's own.

    Raises:
        TraceError: damaged, or `shape` is another model.
    """
    metadata = read_schema(path).metadata
    header = TraceHeader.from_json(metadata[METADATA_KEY], where=str(path))
    # A stated shape may only say what the header says.
    if shape is None:
        return header

    for name in ("layers", "experts"):
        expected = getattr(header.shape, name)
        if getattr(shape, name) != expected:
            raise layout_error(
                path,
                f"shape: {name}",
                f"{expected} as in the header ({header.shape.name})",
                getattr(shape, name),
                "leave the shape out: the trace has its own",
            )

    return header


def read(path: Path, shape: ModelShape) -> Unordered:
    """All columns that a trace may have."""
    check_seal(path)
    names = read_schema(path).names
    known = (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS)
    # Columns of other tools beside ours are left out.
    mapping = {name: [name] for name in known if name in names}
    return columns.unordered(path, shape, mapping, keeps_numbers=True)

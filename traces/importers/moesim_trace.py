"""A moesim trace whose rows lie in any order: what it says about itself stays as it is,
its rows are sorted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from moesim.base.seals import check_seal
from moesim.traces.format.parquet import read_schema
from moesim.traces.format.rows import blocks
from moesim.traces.format.schema import (
    METADATA_KEY,
    OPTIONAL_COLUMNS,
    REQUIRED_COLUMNS,
    ModelShape,
    TraceHeader,
)
from moesim.traces.importers.readers.foreign import Foreign, layout_error
from moesim.traces.importers.readers.tables import parquet_names, parquet_rows

if TYPE_CHECKING:
    from pathlib import Path

KNOWS_SHAPE = True


def recognises(path: Path) -> bool:
    """Whether this is Parquet with our header and columns."""
    try:
        schema = read_schema(path)
    except (pa.ArrowException, OSError, ValueError):
        return False
    has_header = METADATA_KEY in (schema.metadata or {})
    return has_header and set(REQUIRED_COLUMNS) <= set(schema.names)


def read(path: Path, shape: ModelShape | None) -> Foreign:
    """All columns that a trace may have; the header is the trace's own.

    Raises:
        TraceError: damaged, or `shape` is another model.
    """
    check_seal(path)
    text = read_schema(path).metadata[METADATA_KEY]
    header = TraceHeader.from_json(text, where=str(path))
    saved = header.shape
    # A stated shape may only say what the header says.
    for name in ("layers", "experts"):
        if shape is not None and getattr(shape, name) != getattr(saved, name):
            raise layout_error(
                path,
                f"shape: {name}",
                f"{getattr(saved, name)} as in the header ({saved.name})",
                getattr(shape, name),
                "leave the shape out: the trace has its own",
            )

    # Columns of other tools beside ours are left out.
    names = parquet_names(path)
    known = (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS)
    mapping = {name: [name] for name in known if name in names}
    return Foreign(
        lambda: blocks(parquet_rows(path, mapping), keeps_numbers=True), header=header
    )

"""Foreign traces become ours: one file per layout, found by scanning this folder.

An importer is a module with three functions:

- ``recognises(path) -> bool``: is this file of my layout? Never raises.
- ``provenance(path) -> dict``: what the file says about itself, JSON values only; ``notes`` lists oddities.
- ``read(path, shape) -> Iterator[dict[str, ndarray]]``: blocks of rows as `TraceWriter.write` takes them, each block
  one whole sequence, sorted by pos and layer, sequences numbered from 0.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traces.checks import check_sequence
from traces.errors import TraceError
from traces.schema import OPTIONAL_COLUMNS, ModelShape, TraceHeader
from traces.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class ImportSummary:
    """What an import made: which importer read how much, and what deserves a remark."""

    path: Path
    importer: str
    rows: int
    sequences: int
    shape: ModelShape
    columns: tuple[str, ...]
    notes: tuple[str, ...]


def importers() -> dict[str, Any]:
    """Name -> module of every importer in this folder, sorted by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def import_trace(
    source: Path | str,
    out: Path | str,
    *,
    shape: ModelShape,
    progress: Callable[[int], None] | None = None,
) -> ImportSummary:
    """Convert a foreign trace.

    Args:
        source: the foreign file.
        out: the trace to make; it appears only when it is whole.
        shape: the model that the trace came from. Where the trace's top-k differs, the trace is right.
        progress: called with the number of rows written so far.

    Raises:
        TraceError: no importer knows the layout, the shape does not fit, or the file is damaged.
    """
    source, out = Path(source), Path(out)
    if not source.is_file():
        raise TraceError(f"{source}: no such file; expected a foreign trace to import")
    name, importer = _importer_of(source)
    provenance = importer.provenance(source)
    notes = list(provenance.pop("notes", ()))
    blocks = importer.read(source, shape)
    first = next(blocks, None)
    if first is None:
        raise TraceError(f"{source}: expected at least one row, found an empty trace")
    width = first["experts"].shape[1]
    if width != shape.top_k:
        notes.append(f"top-k is {width} in the trace, {shape.top_k} in the model: overridden when it was recorded")
        shape = dataclasses.replace(shape, top_k=width)
    columns = tuple(column for column in OPTIONAL_COLUMNS if column in first)
    details = {**provenance, "importer": name, "file": source.name, "notes": notes, "tool": "moesim trace import"}
    sequences = 0
    with TraceWriter(out, TraceHeader(shape, details), columns) as writer:
        for block in chain((first,), blocks):
            sequence = int(block["seq"][0])

            def bad(row: int, column: str, expected: str, got: object, way_out: str, seq: int = sequence) -> TraceError:
                place = f"{source}: sequence {seq}: row {row}: {column}"
                return TraceError(f"{place}: expected {expected}, got {got}; {way_out}; is the shape right?")

            outside = (block["layer"] < 0) | (block["layer"] >= shape.layers)
            if outside.any():
                row = int(outside.argmax())
                raise bad(row, "layer", f"0..{shape.layers - 1}", block["layer"][row], f"model {shape.name}")
            if block["experts"].max() >= shape.experts or block["experts"].min() < 0:
                beyond = (block["experts"] >= shape.experts) | (block["experts"] < 0)
                row = int(beyond.any(axis=1).argmax())
                raise bad(row, "experts", f"0..{shape.experts - 1}", block["experts"][row].max(), f"model {shape.name}")
            check_sequence(block["pos"], block["phase"], block["layer"], shape.layers, bad)
            writer.write(**block)
            sequences += 1
            if progress is not None:
                progress(writer.rows)
    return ImportSummary(out, name, writer.rows, sequences, shape, columns, tuple(notes))


def _importer_of(source: Path) -> tuple[str, Any]:
    known = importers()
    for name, module in known.items():
        if module.recognises(source):
            return name, module
    layouts = "; ".join(f"{name}: {str(module.__doc__).strip().splitlines()[0]}" for name, module in known.items())
    raise TraceError(f"{source}: no importer knows this layout (or the file is cut off); known: {layouts}")

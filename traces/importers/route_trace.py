"""BigMoeOnEdge route_trace v1: CSV behind a ``#`` preamble, one row per routed expert.

Columns are read by name: turn, phase (0 prefill, 1 decode), step (absolute position),
layer, slot (rank), expert, weight, and others that are left out. The bytes of each
layer's experts replace the model's.

Source: BigMoeOnEdge docs/telemetry.md, "Route trace".
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesim.traces.format.rows import blocks
from moesim.traces.format.sorting import ApartError
from moesim.traces.importers.readers.foreign import (
    NO_WEIGHTS,
    Foreign,
    decoding,
    head,
    layout_error,
)
from moesim.traces.importers.readers.tables import csv_rows
from moesim.traces.models import model_shape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

KNOWS_SHAPE = True

_MAGIC = b"# route_trace v"
_NEEDED = ("turn", "phase", "step", "layer", "slot", "expert")
# The file's columns -> ours.
_OURS = {
    "turn": "seq",
    "phase": "phase",
    "step": "pos",
    "layer": "layer",
    "slot": "rank",
    "expert": "expert",
    "weight": "weight",
}
_PREAMBLE_BYTES = 1 << 20
# A preamble that claims more must not make the dense layers fill the memory.
_MOST_LAYERS = 4096


class _Preamble(NamedTuple):
    """What the file says before its rows.

    Attributes:
        facts: words of the model line, such as ``n_expert``.
        expert_bytes: layer -> bytes of one expert; 0 for a layer without.
        dense_bytes: bytes of everything else, all layers.
        columns: names of the columns.
        size_bytes: of all that stands before the first row.
    """

    facts: dict[str, str]
    expert_bytes: dict[int, int]
    dense_bytes: int
    columns: list[str]
    size_bytes: int


def recognises(path: Path) -> bool:
    """Whether the first line is ``# route_trace v…``."""
    return head(path, 64).startswith(_MAGIC)


def read(path: Path, shape: ModelShape | None) -> Foreign:
    """The file's rows, a turn of the session being a sequence."""
    opening = _preamble(path)
    columns = {_OURS[name]: [name] for name in opening.columns if name in _OURS}
    return Foreign(
        lambda: _rows(path, opening, columns),
        shape=_shape(path, shape, opening),
        facts={
            name: opening.facts[name]
            for name in ("model", "arch")
            if name in opening.facts
        },
        no_weights="" if "weight" in columns else NO_WEIGHTS,
    )


def _rows(
    path: Path, opening: _Preamble, columns: dict[str, list[str]]
) -> Iterator[Block]:
    rows = csv_rows(path, opening.columns, columns, start=opening.size_bytes)
    # The order of turns is that of their numbers.
    for block in blocks(rows, keeps_numbers=True):
        if "weight" in block and not np.isfinite(block["weight"]).all():
            # One unknown weight makes all unknown: read again without them.
            del columns["weight"]
            raise ApartError
        yield block


def _shape(path: Path, shape: ModelShape | None, opening: _Preamble) -> ModelShape:
    """The shape with layers, experts, top-k, dense layers and the bytes of each layer's
    experts from the preamble; without one, widths are stated defaults, for the file
    knows bytes only.

    Raises:
        TraceError: the preamble describes another model than the shape.
    """
    facts, expert_bytes = opening.facts, opening.expert_bytes
    sparse = [layer for layer, size in sorted(expert_bytes.items()) if size]
    if shape is None:
        if not sparse or not {"n_expert", "n_expert_used"} <= facts.keys():
            expected = "the sizes of all layers"
            raise layout_error(path, "preamble", expected, "others", "say --shape")
        name = facts.get("model", "route_trace").replace(",", "_")
        shape = model_shape(
            f"name={name},layers={len(sparse)},experts={facts['n_expert']},"
            f"top_k={facts['n_expert_used']},expert_bytes={max(expert_bytes.values())}"
        )
    with decoding(path, "preamble"):
        experts = int(facts.get("n_expert", shape.experts))
        top_k = int(facts.get("n_expert_used", shape.top_k))
        total = int(facts.get("n_layer", 0)) or len(expert_bytes)

    if not max(expert_bytes, default=0) < max(total, 1) <= _MOST_LAYERS:
        expected = f"1..{_MOST_LAYERS}, and a line for each"
        raise layout_error(path, "preamble: n_layer", expected, total)
    for name, count in (("layers", len(sparse) or shape.layers), ("experts", experts)):
        due = getattr(shape, name)
        if count != due:
            expected = f"{due} as in {shape.name}"
            way_out = "is the shape right?"
            raise layout_error(path, f"preamble: {name}", expected, count, way_out)
    if not sparse:
        return shape

    # What the preamble says is no assumption any longer.
    known = ("expert_bytes", "other_bytes")
    return dataclasses.replace(
        shape,
        top_k=top_k if 1 <= top_k <= shape.experts else shape.top_k,
        expert_bytes=tuple(expert_bytes[layer] for layer in sparse),
        other_bytes=opening.dense_bytes or shape.other_bytes,
        dense_layers=tuple(layer for layer in range(total) if layer not in sparse),
        assumed=tuple(name for name in shape.assumed if name not in known),
    )


# -- preamble --------------------------------------------------------------------------


def _preamble(path: Path) -> _Preamble:
    """Read the lines before the rows.

    Raises:
        TraceError: another version, or no header line.
    """
    facts: dict[str, str] = {}
    expert_bytes: dict[int, int] = {}
    dense_bytes = 0
    size_bytes = 0
    lines = head(path, _PREAMBLE_BYTES).splitlines(keepends=True)
    for number, data in enumerate(lines, start=1):
        size_bytes += len(data)
        # Comments may hold anything; only what is looked for must be readable.
        line = data.decode("utf-8", "replace").rstrip("\r\n")
        place = f"line {number}"
        if number == 1:
            if line.strip() != "# route_trace v1":
                way_out = "is there a newer moesim?"
                raise layout_error(path, place, "# route_trace v1", line[:40], way_out)
            continue
        if not line.startswith("#"):
            columns = _header_columns(path, place, line)
            return _Preamble(facts, expert_bytes, dense_bytes, columns, size_bytes)

        words = dict(re.findall(r"(\w+)=(\S+)", line))
        if "expert_bytes" not in words:
            facts |= words
            continue
        with decoding(path, place):
            layer = int(words["layer"])
            expert_bytes[layer] = int(words["expert_bytes"])
            of_layer = int(words["dense_bytes"])
        if min(layer, expert_bytes[layer], of_layer) < 0:
            raise layout_error(path, place, "numbers from 0", line[:80])
        dense_bytes += of_layer

    expected = "a header line behind the preamble"
    raise layout_error(path, f"line {len(lines)}", expected, "the end of the file")


def _header_columns(path: Path, place: str, line: str) -> list[str]:
    columns = [name.strip() for name in line.split(",")]
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise layout_error(path, place, f"a column {missing[0]!r}", line[:80])
    if len(set(columns)) != len(columns):
        raise layout_error(path, place, "every column once", line[:80])
    return columns

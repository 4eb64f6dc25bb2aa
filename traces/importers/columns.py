"""Plain Parquet or CSV with a column mapping: ``map`` =
pos=position,experts=topk_ids,layer=layer_id,….

Ours on the left, the file's on the right: seq, pos, phase, layer, experts, weights,
scores, token; or expert (one row per selected expert) with rank. ``experts=e*`` gathers
the columns e0, e1, …, as does no mapping at all. Names that are the same need no
mapping. In CSV a list is written in one field, its numbers apart by blanks, semicolons,
bars or (quoted) commas, brackets or not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.parquet import read_schema
from moesim.traces.format.rows import LISTS, Appearance, blocks
from moesim.traces.importers.readers.foreign import (
    NAMES,
    PROMPT_TOKENS,
    RESTARTS,
    Foreign,
    decoding,
    head,
    layout_error,
    one_of,
    prompt_length,
)
from moesim.traces.importers.readers.sequence_rows import counted
from moesim.traces.importers.readers.tables import csv_rows, parquet_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.importers.readers.foreign import Mapped

    Block = dict[str, np.ndarray]
    # Our column -> the file's columns.
    Columns = dict[str, list[str]]

GENERIC = True
MAPPED = (
    "seq",
    "pos",
    "phase",
    "layer",
    "experts",
    "expert",
    "rank",
    "weights",
    "weight",
    "scores",
    "token",
)
OPTIONS = {"prompt_tokens": PROMPT_TOKENS, "restarts": RESTARTS}

_HEADER = re.compile(rb"\"?[A-Za-z_][\w .\-\"]*([,;\t][\w .\-\"]+)+\s*")


def recognises(path: Path, _: Mapped) -> bool:
    """Whether this is Parquet, or text whose first line names columns."""
    start = head(path, 4096)
    if start.startswith(b"PAR1"):
        return True
    first_line = start.split(b"\n", 1)[0].rstrip(b"\r")
    return _HEADER.fullmatch(first_line) is not None


def read(path: Path, shape: ModelShape, names: Mapped, **given: str) -> Foreign:
    """The mapped columns."""
    return read_layers([path], shape, names, **given)


def read_layers(
    files: list[Path], _: ModelShape, names: Mapped, **given: str
) -> Foreign:
    """The mapped columns of a file, or of several, one for each MoE layer."""
    path = files[0]
    by_layer = len(files) > 1
    columns = _columns(path, names, () if by_layer else ("pos", "layer"))
    used = {name: "+".join(theirs) for name, theirs in columns.items()}
    return Foreign(
        lambda: _rows_by_layer(files, columns) if by_layer else _rows(path, columns),
        prompt=prompt_length(path, given),
        passes=bool(one_of(path, given, "restarts", ("passes",))),
        facts={"columns": used},
    )


# -- mapping ---------------------------------------------------------------------------


def _columns(path: Path, words: Mapped, needed: tuple[str, ...]) -> Columns:
    """Our column -> the file's columns.

    Raises:
        TraceError: a word for a column that the file does not have, or one of `needed`
            left out.
    """
    # What has a known name already needs no word; a word may still say otherwise.
    names = _names(path)
    columns = _known(names)
    if not words and not {"experts", "expert"} & columns.keys():
        columns |= {"experts": ranks} if (ranks := _numbered(names, "e")) else {}
    # One of the two kinds of rows: a word for one excludes the other.
    for name, other in (("expert", "experts"), ("experts", "expert")):
        if name in words:
            columns.pop(other, None)
    for name, source in words.items():
        is_pattern = source.endswith("*") and name in LISTS
        columns[name] = _numbered(names, source[:-1]) if is_pattern else [source]
        if not columns[name] or not set(columns[name]) <= set(names):
            expected = f"one of {', '.join(names)}"
            raise layout_error(path, f"--map: {name}", expected, source, "")

    _check_complete(path, words, columns, names, needed)
    return columns


def _check_complete(
    path: Path,
    words: Mapped,
    columns: Columns,
    names: list[str],
    needed: tuple[str, ...],
) -> None:
    actual = ", ".join(names)
    place = "columns"
    if not words:
        place = "no importer knows this layout as it is: columns"
    for name in needed:
        if name not in columns:
            way_out = f"name it with --map {name}=THEIRS"
            raise layout_error(path, place, f"one for {name}", actual, way_out)
    # Both would contradict each other, and without either there is no routing.
    if ("experts" in columns) == ("expert" in columns):
        expected = "experts (all ids of a row) or expert (one)"
        raise layout_error(path, place, expected, actual, "use --map …")
    # A list of weights cannot be shared out to rows of one expert each.
    for name in ("weights", "scores"):
        if "expert" in columns and name in columns:
            place = f"columns: {name}"
            expected = "weight, one per expert row"
            raise layout_error(path, place, expected, "a list", "map weight=… instead")


def _known(names: list[str]) -> Columns:
    """Our column -> the file's column of a name that is known."""
    columns = {name: [name] for name in MAPPED if name in names}
    # Without a position, a token's number is one.
    if "token" in columns and not any(name in names for name in NAMES["pos"]):
        columns["pos"] = columns.pop("token")
    for name, others in NAMES.items():
        # One row per expert has an id of its own, whatever lists there are beside it.
        if name == "experts" and "expert" in columns:
            continue
        known = [other for other in others if other in names]
        if known:
            columns.setdefault(name, known[:1])
    return columns


def _numbered(names: list[str], prefix: str) -> list[str]:
    """Columns such as e0, e1, …, by their numbers."""
    rest = {
        name: name.removeprefix(prefix) for name in names if name.startswith(prefix)
    }
    numbered = [name for name, number in rest.items() if number.isdecimal()]
    return sorted(numbered, key=lambda name: int(rest[name]))


# -- the file --------------------------------------------------------------------------


def _names(path: Path) -> list[str]:
    with decoding(path, "columns"):
        if head(path, 4) == b"PAR1":
            return list(read_schema(path).names)
        # Arrow would take the names apart too, but only while reading the rows.
        line = _header_line(path)
        return [name.strip().strip('"') for name in line.split(_delimiter(line))]


def _header_line(path: Path) -> str:
    return head(path, 1 << 16).decode("utf-8").splitlines()[0]


def _delimiter(line: str) -> str:
    # Spreadsheets write semicolons where the comma is the decimal point.
    return max(",;\t", key=line.count)


def _rows(
    path: Path, columns: Columns, sequences: Appearance | None = None
) -> Iterator[Block]:
    """Read the file's rows, some at a time; what stands below another header line is
    another file, whose sequences are others.
    """
    if head(path, 4) == b"PAR1":
        return blocks(parquet_rows(path, columns), sequences)
    line = _header_line(path)
    names = _names(path)
    header = line.strip()
    rows = csv_rows(path, names, columns, header=header, delimiter=_delimiter(line))
    return blocks(rows, sequences)


def _rows_by_layer(files: list[Path], columns: Columns) -> Iterator[Block]:
    """Rows of the files one after the other, a layer each; a sequence has the same
    name in all of them. Without positions, these count its rows.
    """
    rows_of_first = None
    sequences = Appearance()
    for layer, file in enumerate(files):
        total = 0
        rows = _rows(file, columns, sequences)
        for block in rows if "pos" in columns else counted(rows, "seq"):
            total += len(block["seq"])
            yield block | {"layer": np.full(len(block["seq"]), layer, np.int32)}
        rows_of_first = total if rows_of_first is None else rows_of_first
        if total != rows_of_first:
            expected = f"{rows_of_first} as in {files[0].name}"
            raise layout_error(file, "rows", expected, total, "one row per token")

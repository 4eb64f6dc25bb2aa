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
from moesim.traces.format.sorting import Appearance, Unordered
from moesim.traces.importers.readers.choices import Choices
from moesim.traces.importers.readers.foreign import (
    MAP,
    NAMES,
    NO_WEIGHTS,
    PROMPT_TOKENS,
    PROMPT_TOKENS_NOTE,
    RESTARTS,
    TWICE,
    Foreign,
    decoding,
    head,
    layout_error,
    named_by,
    one_of,
    prompt_length,
)
from moesim.traces.importers.readers.sequence_rows import finished, of_passes
from moesim.traces.importers.readers.tables import (
    LISTS,
    blocks,
    csv_rows,
    parquet_rows,
)
from moesim.traces.importers.readers.text import sections

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]
    # Our column -> the file's columns.
    Mapping = dict[str, list[str]]

GENERIC = True
OPTIONS = {"map": MAP, "prompt_tokens": PROMPT_TOKENS, "restarts": RESTARTS}

_OUR_COLUMNS = (
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
_HEADER = re.compile(rb"\"?[A-Za-z_][\w .\-\"]*([,;\t][\w .\-\"]+)+\s*")


def recognises(path: Path) -> bool:
    """Whether this is Parquet, or text whose first line names columns."""
    start = head(path, 4096)
    if start.startswith(b"PAR1"):
        return True
    first_line = start.split(b"\n", 1)[0].rstrip(b"\r")
    return _HEADER.fullmatch(first_line) is not None


def read(path: Path, shape: ModelShape, **given: str) -> Foreign:
    """The mapped columns."""
    return _foreign(path, shape, given, [])


def read_layers(files: list[Path], shape: ModelShape, **given: str) -> Foreign:
    """The mapped columns of several files, one for each MoE layer."""
    return _foreign(files[0], shape, given, files)


def _foreign(
    path: Path, shape: ModelShape, given: dict[str, str], layers: list[Path]
) -> Foreign:
    names = _names(path)
    mapping = mapped(path, given, names, () if layers else ("pos", "layer"))
    prompt = prompt_length(path, given)
    passes = one_of(path, given, "restarts", ("passes",))
    choices = Choices(path)

    def pieces() -> Iterator[Block]:
        rows = _pieces_by_layer(layers, mapping) if layers else rows_of(path, mapping)
        rows = choices.gathered(rows)
        return of_passes(path, rows) if passes else rows

    def finish(block: Block) -> Block:
        tokens = choices.whole(block)
        return finished(path, shape, tokens, ("phase", "token"), prompt, TWICE)

    notes = [] if {"weights", "weight"} & mapping.keys() else [NO_WEIGHTS]
    if not passes and "phase" not in mapping and prompt is None:
        notes.append(PROMPT_TOKENS_NOTE)
    used = {name: "+".join(theirs) for name, theirs in mapping.items()}
    return Foreign(Unordered(pieces, finish), notes=notes, facts={"columns": used})


# -- mapping ---------------------------------------------------------------------------


def mapped(
    path: Path, given: dict[str, str], names: list[str], needed: tuple[str, ...]
) -> Mapping:
    """Return our column -> the file's columns.

    Args:
        path: the file, for errors.
        given: options: ``map``, words ``ours=theirs`` joined by commas.
        names: the file's columns.
        needed: what the file must have, of ours.

    Raises:
        TraceError: a word that is no mapping, an unknown column on either side, or a
            needed one left out.
    """
    # What has a known name already needs no word; a word may still say otherwise.
    columns = _known(names)
    words = named_by(path, given, _OUR_COLUMNS)
    if "map" not in given and not {"experts", "expert"} & columns.keys():
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

    _check_complete(path, given, columns, names, needed)
    return columns


def _check_complete(
    path: Path,
    given: dict[str, str],
    columns: Mapping,
    names: list[str],
    needed: tuple[str, ...],
) -> None:
    actual = ", ".join(names)
    place = "columns"
    if "map" not in given:
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


def _known(names: list[str]) -> Mapping:
    """Our column -> the file's column of a name that is known."""
    columns = {name: [name] for name in _OUR_COLUMNS if name in names}
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


def rows_of(
    path: Path, mapping: Mapping, sequences: Appearance | None = None
) -> Iterator[Block]:
    """Read the file's rows, some at a time; what stands below another header line is
    another file, whose sequences are others.
    """
    if head(path, 4) == b"PAR1":
        yield from blocks(parquet_rows(path, mapping), sequences)
        return
    names = _names(path)
    line = _header_line(path)
    first = 0
    for part in sections(path, line.strip().encode()) or [(0, 0)]:
        rows = csv_rows(path, names, mapping, part, delimiter=_delimiter(line))
        highest = first
        for block in blocks(rows, None if first else sequences):
            block["seq"] += np.int32(first)
            highest = max(highest, 1 + int(block["seq"].max()))
            yield block
        first = highest


def _pieces_by_layer(files: list[Path], mapping: Mapping) -> Iterator[Block]:
    """Rows of the files one after the other, a layer each; a sequence has the same
    name in all of them. Without positions, these count its rows.
    """
    rows_of_first = None
    sequences = Appearance()
    for layer, file in enumerate(files):
        total = 0
        counted = np.zeros(0, np.int64)
        for block in rows_of(file, mapping, sequences):
            seq = block["seq"]
            total += len(seq)
            if "pos" not in mapping:
                counts = np.bincount(seq, minlength=len(counted))
                counted = np.pad(counted, (0, len(counts) - len(counted)))
                order = np.argsort(seq, kind="stable")
                first = (np.cumsum(counts) - counts)[seq[order]]
                block["pos"] = np.empty(len(seq), np.int64)
                block["pos"][order] = np.arange(len(seq)) - first + counted[seq[order]]
                counted += counts
            yield block | {"layer": np.full(len(seq), layer, np.int32)}
        rows_of_first = total if rows_of_first is None else rows_of_first
        if total != rows_of_first:
            expected = f"{rows_of_first} as in {files[0].name}"
            raise layout_error(file, "rows", expected, total, "one row per token")

"""Layouts of JSON lines that hold routing: lines in, one unchecked table of rows out.

`moesim.traces.importers.jsonl` says which layouts there are, and checks the rows.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from moesim.base.inputs import load_json, read_text
from moesim.traces.format.parquet import lists, numbers, values
from moesim.traces.importers.readers.foreign import (
    NAMES,
    decoding,
    layout_error,
    named_by,
)
from moesim.traces.importers.readers.json_lines import (
    JsonLinesReader,
    columns_of,
    is_null,
    list_lengths,
    list_values,
)
from moesim.traces.importers.readers.text import filled, first_line, first_object

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.base.errors import TraceError
    from moesim.traces.importers.readers.json_lines import JsonLines

Keys = dict[str, tuple[str, ...]]
"""Our column -> the keys that stand for it, the most explicit first."""

# Beside ``pos``, a ``token`` is a token id.
KEYS: Keys = NAMES | {"pos": (*NAMES["pos"], "token", "t", "step")}
ORIGINS = "origin_rows"
"""The token of each row of a batch."""
_TYPES: dict[str, Any] = {
    "seq": "VARCHAR",
    "phase": "VARCHAR",
    "pos": "DOUBLE",
    "layer": "DOUBLE",
    "experts": ["DOUBLE"],
    "weights": ["DOUBLE"],
}
# An error quotes no more of a value than this.
_QUOTED_LETTERS = 80


class RowTable(NamedTuple):
    """Rows of some lines, as Arrow arrays. M lines, N rows.

    Attributes:
        lines: the lines.
        line: int64 [N], which of the M lines each row comes from.
        keys: what the lines call our columns.
        seq: strings [M], None where no line names its sequence.
        phase: strings [M], None where no line has one.
        pos: doubles [N], None where no line has one.
        layer: doubles [N], None where no row has one.
        experts: lists of doubles [N], None where no row has them.
        weights: lists of doubles [N], None where no row has them.
    """

    lines: JsonLines
    line: np.ndarray
    keys: Keys
    seq: Any
    phase: Any
    pos: Any
    layer: Any
    experts: Any
    weights: Any

    def error(self, row: int, name: str, expected: object) -> TraceError:
        """Return the error of one row, quoting what its line has for column `name`."""
        line = int(self.line[row])
        value = self.lines.parsed(line)
        place = f"line {self.lines.number(line)}: {name}"

        if isinstance(value, dict):
            key = next((key for key in self.keys[name] if key in value), None)
            # Without such a key, the keys that there are say what went wrong.
            value = ", ".join(value) if key is None else value[key]

        quoted = str(value)
        if len(quoted) > _QUOTED_LETTERS:
            quoted = f"{quoted[:_QUOTED_LETTERS]}…"
        return layout_error(self.lines.path, place, expected, quoted)


def keys_of(path: Path, given: dict[str, str]) -> Keys:
    """Return the keys of our columns, those of the option ``map`` in place of ours.

    Raises:
        TraceError: a word that is no mapping.
    """
    words = named_by(path, given, tuple(KEYS))
    return KEYS | {name: (key,) for name, key in words.items()}


def has_key(value: dict[str, Any], name: str, keys: Keys = KEYS) -> bool:
    """Whether an object has column `name` under any of its keys."""
    return any(key in value for key in keys[name])


def first_columns(path: Path, keys: Keys = KEYS) -> set[str]:
    """Return which of our columns the first line has, in itself or in its first layer.

    Raises:
        TraceError: the first line is not JSON.
    """
    first = _first_row(path, _rows_of(path))
    line = first if isinstance(first, dict) else {}
    layers = line.get("layers")
    layer = layers[0] if isinstance(layers, list) and layers else None

    parts = [line, layer] if isinstance(layer, dict) else [line]
    return {
        name
        for name, candidates in keys.items()
        if any(part.get(key) is not None for part in parts for key in candidates)
    }


def row_tables(path: Path, keys: Keys = KEYS) -> Iterator[RowTable]:
    """Read the rows of some lines at a time, at least one row each.

    Raises:
        TraceError: a line that is not JSON, or not of the layout of the first one.
    """
    rows = _rows_of(path)
    first = _first_row(path, rows)
    if first is None:
        return
    _refuse_two_positions(path, first, keys)
    layout = _layout_of(first, rows.top_k, keys)
    reader = JsonLinesReader(layout.structure)

    held = [reader.parse(path, rows.held)] if rows.held else []
    behind = [] if rows.skip is None else reader.read(path, rows.skip)
    for lines in chain(held, behind):
        if not len(lines.place):
            continue
        table = layout.table(lines)
        if len(table.line):
            yield table


def _refuse_two_positions(path: Path, first: Any, keys: Keys) -> None:
    """Refuse rows with both a ``token`` and a ``step``: either may be a token id."""
    if not isinstance(first, dict):
        return
    known = [key for key in keys["pos"] if key in first]
    if known and known[0] == "token" and "step" in known:
        raise layout_error(
            path,
            "rows",
            "one key for the position",
            "token and step",
            "say --map pos=token or --map pos=step",
        )


# -- which lines hold rows -------------------------------------------------------------


class _Rows(NamedTuple):
    """Where the rows of a file are.

    Attributes:
        top_k: as its header says, 0 without one.
        held: rows in memory, as lines; they come first.
        skip: how many lines of the file are no rows; None where none is.
    """

    top_k: int
    held: list[bytes]
    skip: int | None


def _rows_of(path: Path) -> _Rows:
    first = first_object(path)
    if first is not None:
        if not _is_header(first):
            return _Rows(0, [], 0)
        return _Rows(_header_top_k(path, first), _lists_in(first), 1)

    # One JSON text over many lines.
    with decoding(path, "JSON"):
        text = load_json(read_text(path))
    if _is_header(text):
        return _Rows(_header_top_k(path, text), _lists_in(text), None)
    return _Rows(0, [json.dumps(text).encode()], None)


def _first_row(path: Path, rows: _Rows) -> Any:
    """What the first line of rows holds; None without one."""
    numbered = next(filled(rows.held), None)
    if numbered is None and rows.skip is not None:
        numbered = first_line(path, rows.skip)
    if numbered is None:
        return None

    number, text = numbered
    with decoding(path, f"line {number}"):
        return json.loads(text.rstrip())


def _is_header(value: Any) -> bool:
    return isinstance(value, dict) and "top_k" in value and not has_key(value, "pos")


def _header_top_k(path: Path, header: dict[str, Any]) -> int:
    with decoding(path, "header: top_k"):
        return int(header["top_k"])


def _lists_in(header: dict[str, Any]) -> list[bytes]:
    """The lists ``[layer, ids]`` that a header holds itself, as lines."""
    return [
        json.dumps(row).encode()
        for value in header.values()
        if isinstance(value, list) and value and isinstance(value[0], list)
        for row in value
    ]


# -- layouts ---------------------------------------------------------------------------


class _Layout(Protocol):
    """How lines hold rows."""

    structure: Any

    def table(self, lines: JsonLines) -> RowTable:
        """Return the rows of one or more lines."""


def _layout_of(first: Any, top_k: int, keys: Keys) -> _Layout:
    """The layout of a file by its first line; `top_k` as a header says."""
    if isinstance(first, list):
        nested = bool(first) and isinstance(first[0], list)
        return _ListLayout(top_k, nested=nested)

    line = first if isinstance(first, dict) else {}
    if ORIGINS in line:
        return _BatchLayout(line, keys)
    return _TokenLayout(line, keys) if "layers" in line else _RowLayout(line, keys)


def _structure(
    value: dict[str, Any], names: tuple[str, ...], keys: Keys
) -> dict[str, Any]:
    """The structure of lines like `value`: what it has for each column of `names`."""
    structure: dict[str, Any] = {}
    for name in names:
        used = [key for key in keys[name] if key in value]
        # Looking for a key costs time at every line. Of a column that the first line
        # does not have, a later line may have any.
        structure |= dict.fromkeys(used[:1] or keys[name], _TYPES[name])

    return structure


def _column(columns: dict[str, Any], name: str, keys: Keys) -> Any:
    """The column under the key that the lines have for it; None under none."""
    candidates = [columns[key] for key in keys[name] if key in columns]
    complete = (column for column in candidates if not column.null_count)
    partial = (column for column in candidates if column.null_count < len(column))
    return next(chain(complete, partial), None)


class _RowLayout:
    """An object per token and layer."""

    def __init__(self, first: dict[str, Any], keys: Keys) -> None:
        self._keys = keys
        self.structure = _structure(first, tuple(keys), keys)

    def table(self, lines: JsonLines) -> RowTable:
        columns = columns_of(lines.values)
        line = np.arange(len(lines.place))
        keys = self._keys
        by_name = {name: _column(columns, name, keys) for name in keys}
        return RowTable(lines, line, keys, **by_name)


class _TokenLayout:
    """An object per token with its layers: lists of ids, or objects."""

    def __init__(self, first: dict[str, Any], keys: Keys) -> None:
        self._keys = keys
        layers = first["layers"] if isinstance(first["layers"], list) else []
        objects = [layer for layer in layers if isinstance(layer, dict)]
        self._has_objects = bool(objects)

        layer: Any = _TYPES["experts"]
        if objects:
            layer = _structure(objects[0], ("layer", "experts", "weights"), keys)
        self.structure = _structure(first, ("seq", "phase", "pos"), keys) | {
            "layers": [layer]
        }

    def table(self, lines: JsonLines) -> RowTable:
        columns = columns_of(lines.values)
        layers = columns["layers"]
        if layers.null_count:
            first = int(is_null(layers).argmax())
            place = f"line {lines.number(first)}"
            raise layout_error(lines.path, place, "a list of layers", "none")

        lengths = list_lengths(layers)
        if not lengths.all():
            first = int(lengths.argmin())
            place = f"line {lines.number(first)}"
            raise layout_error(lines.path, place, "a list of layers", "an empty one")
        line = np.repeat(np.arange(len(lengths)), lengths)
        first_row = np.cumsum(lengths) - lengths
        turn = (np.arange(len(line)) - first_row[line]).astype(np.float64)

        layer = None
        experts = list_values(layers)
        weights = None
        if self._has_objects:
            parts = columns_of(experts)
            layer = _column(parts, "layer", self._keys)
            experts = _column(parts, "experts", self._keys)
            weights = _column(parts, "weights", self._keys)

        pos = _column(columns, "pos", self._keys)
        return RowTable(
            lines=lines,
            line=line,
            keys=self._keys,
            seq=_column(columns, "seq", self._keys),
            phase=_column(columns, "phase", self._keys),
            pos=None if pos is None else pos.take(numbers(line)),
            # A layer without a number is the one whose turn it is.
            layer=numbers(turn) if layer is None else layer.fill_null(numbers(turn)),
            experts=experts,
            weights=weights,
        )


def origins_are_requests(first: dict[str, Any]) -> bool:
    """Whether the rows of the first batch that have one origin are several: its tokens,
    and the origin a request. Else it is the token itself.
    """
    origins = first[ORIGINS] if isinstance(first[ORIGINS], list) else []
    return len(set(map(str, origins))) < len(origins)


class _BatchLayout:
    """An object per layer of a batch: lists of tokens, ids and weights, row by row."""

    def __init__(self, first: dict[str, Any], keys: Keys) -> None:
        self._keys = keys
        lists = _structure(first, ("experts", "weights"), keys)
        self.structure = _structure(first, ("seq", "phase", "layer"), keys)
        self.structure |= {name: [kind] for name, kind in lists.items()}
        self.structure |= {ORIGINS: ["DOUBLE"], "batch_id": "VARCHAR"}
        self._are_requests = origins_are_requests(first)
        # Rows so far of each request at each layer.
        self._rows: Counter[tuple[str, float]] = Counter()

    def table(self, lines: JsonLines) -> RowTable:
        columns = columns_of(lines.values)
        experts = _column(columns, "experts", self._keys)
        weights = _column(columns, "weights", self._keys)
        origins = columns[ORIGINS]
        layer = _column(columns, "layer", self._keys)
        lengths = list_lengths(origins)
        parts = [part for part in (experts, weights) if part is not None]
        short = [list_lengths(part) != lengths for part in parts]
        if experts is None or layer is None or np.any(short) or not lengths.all():
            wrong = int(np.any(short, axis=0).argmax()) if short else 0
            place = f"line {lines.number(wrong)}"
            expected = f"a layer, and as many {ORIGINS} as rows of experts"
            raise layout_error(lines.path, place, expected, "others")

        line = np.repeat(np.arange(len(lengths)), lengths)
        seq = _column(columns, "seq", self._keys)
        seq = columns["batch_id"] if seq is None else seq
        pos = list_values(origins)
        layers = layer.take(numbers(line))
        if self._are_requests:
            names = [
                f"{batch}:{origin:g}"
                for batch, origin in zip(
                    seq.take(numbers(line)).to_pylist(), pos.to_pylist(), strict=True
                )
            ]
            pos = numbers(self._turns(names, layers.to_pylist()))
            seq = pa.array(names)
        return RowTable(
            lines=lines,
            line=line,
            keys=self._keys,
            seq=seq,
            phase=_column(columns, "phase", self._keys),
            pos=pos,
            layer=layers,
            experts=list_values(experts),
            weights=None if weights is None else list_values(weights),
        )

    def _turns(self, names: list[str], layers: list[float]) -> np.ndarray:
        """float64 [N]: how many rows of its request at its layer came before each."""
        turns = np.empty(len(names))
        for row, key in enumerate(zip(names, layers, strict=True)):
            turns[row] = self._rows[key]
            self._rows[key] += 1
        return turns


class _ListLayout:
    """Lists ``[layer, e0, …, eK-1]``, or lists of such lists.

    A layer that is not above the one before begins a token.
    """

    def __init__(self, top_k: int, *, nested: bool) -> None:
        self._top_k = top_k
        self._nested = nested
        self._token = -1
        self._layer = -1.0
        self.structure = [["DOUBLE"]] if nested else ["DOUBLE"]

    def table(self, lines: JsonLines) -> RowTable:
        rows = lines.values
        line = np.arange(len(rows))
        if self._nested:
            line = np.repeat(line, list_lengths(rows))
            rows = list_values(rows)

        lengths = list_lengths(rows)
        self._top_k = self._top_k or int(lengths[0]) - 1
        wrong = lengths != self._top_k + 1
        if wrong.any() or self._top_k < 1:
            row = int(wrong.argmax())
            raise layout_error(
                lines.path,
                f"line {lines.number(line[row])}",
                f"[layer, {max(self._top_k, 1)} ids] as in the first row or header",
                f"{lengths[row]} values",
            )

        cells = list_values(rows)
        if cells.null_count:
            row = int(is_null(cells).argmax()) // (self._top_k + 1)
            place = f"line {lines.number(line[row])}"
            actual = lines.parsed(int(line[row]))
            raise layout_error(lines.path, place, "numbers", actual)

        table = values(cells).reshape(len(rows), -1)
        layer = table[:, 0]
        return RowTable(
            lines=lines,
            line=line,
            keys=KEYS,
            seq=None,
            phase=None,
            pos=numbers(self._positions(layer)),
            layer=numbers(layer),
            experts=lists(np.ascontiguousarray(table[:, 1:])),
            weights=None,
        )

    def _positions(self, layer: np.ndarray) -> np.ndarray:
        """float64 [N]: the token of each row."""
        before = np.concatenate(([self._layer], layer[:-1]))
        begins = layer <= before
        begins[0] |= self._token < 0

        pos = self._token + np.cumsum(begins)
        self._token = int(pos[-1])
        self._layer = float(layer[-1])
        return pos.astype(np.float64)

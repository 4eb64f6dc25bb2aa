"""JSONL of routing, one object or list per line: by token and layer, or by token with a
list of layers.

Four layouts: ``{layer_idx, token_idx, selected_ids, gate_weights}`` (lattice; also
with `seq` and `phase`); ``{token, layers: [[ids], …]}`` or ``{pos, layers: [{experts,
weights}, …]}``; ``{layer, origin_rows, topk_experts: [[ids], …]}``, a batch at one
layer whose rows belong to these tokens; and lists ``[layer, e0, …, eK-1]`` behind an
object with ``top_k`` (imp), in lines or as one object that holds them all.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from moesim.base.inputs import load_json, read_text
from moesim.traces.format.parquet import lists, numbers, values
from moesim.traces.format.sorting import Unordered
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
from moesim.traces.importers.readers.json_lines import (
    columns_of,
    items_of,
    json_lines,
    lengths_of,
)
from moesim.traces.importers.readers.sequence_rows import finished, of_passes
from moesim.traces.importers.readers.tables import blocks
from moesim.traces.importers.readers.text import first_line, first_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.importers.readers.json_lines import Lines
    from moesim.traces.importers.readers.tables import Rows

    Block = dict[str, np.ndarray]
    Keys = dict[str, tuple[str, ...]]

ASKED = ("map",)
OPTIONS = {"map": MAP, "prompt_tokens": PROMPT_TOKENS, "restarts": RESTARTS}

# Our column -> the keys that stand for it, the most explicit first. Beside ``pos``, a
# ``token`` is a token id.
_KEYS: Keys = NAMES | {"pos": (*NAMES["pos"], "token", "t", "step")}
_KINDS: dict[str, Any] = {
    "seq": "VARCHAR",
    "phase": "VARCHAR",
    "pos": "DOUBLE",
    "layer": "DOUBLE",
    "experts": ["DOUBLE"],
    "weights": ["DOUBLE"],
}
_ORIGINS = "origin_rows"
_ROW = "a layer and its experts"


class _Text(NamedTuple):
    """Where the rows of a file are.

    Attributes:
        first: the first row.
        top_k: as a header says, without which no row is a list.
        held: rows in memory, as lines; they come first.
        skip: how many lines of the file are no rows; None where none is.
    """

    first: Any
    top_k: int
    held: list[bytes]
    skip: int | None


class _Layout(NamedTuple):
    """How lines hold rows: what is wanted of a line, and what makes of lines which line
    each row comes from, int [N], and our columns of them; None for those without.
    """

    structure: Any
    rows: Callable[[Lines], tuple[np.ndarray, dict[str, Any]]]


def _keys(path: Path, given: Mapping[str, str]) -> Keys:
    words = named_by(path, given, _KEYS)
    return _KEYS | {name: (key,) for name, key in words.items()}


def recognises(path: Path, **given: str) -> bool:
    """Whether the first line is a row, a token with layers, or an object with
    ``top_k``; or one such object in all.
    """
    first = first_object(path)
    if isinstance(first, dict):
        keys = _keys(path, given)
        is_row = _has(first, "layer", keys) and _has(first, "experts", keys)
        is_placed = _has(first, "pos", keys) or _ORIGINS in first
        return "top_k" in first or (is_placed and ("layers" in first or is_row))

    start = head(path, 512).lstrip()
    return start.startswith(b"{") and (b'"top_k"' in start or b'"layers"' in start)


def _has(value: dict[str, Any], name: str, keys: Keys) -> bool:
    return any(key in value for key in keys[name])


def read(path: Path, shape: ModelShape, **given: str) -> Foreign:
    """The file's rows."""
    prompt = prompt_length(path, given)
    keys = _keys(path, given)
    passes = one_of(path, given, "restarts", ("passes",))
    text = _text_of(path)

    def pieces() -> Iterator[Block]:
        rows = blocks(_rows(path, text, keys))
        return of_passes(path, rows) if passes else rows

    def finish(block: Block) -> Block:
        return finished(path, shape, block, ("phase",), prompt, TWICE)

    # The first row speaks for all; a mixture is refused while reading.
    line = text.first if isinstance(text.first, dict) else {}
    layers = line.get("layers")
    layer = layers[0] if isinstance(layers, list) and layers else None
    parts = [line, layer] if isinstance(layer, dict) else [line]
    known = {
        name
        for name, names in keys.items()
        if any(part.get(key) is not None for part in parts for key in names)
    }
    notes = [] if "weights" in known else [NO_WEIGHTS]
    if not passes and "phase" not in known and prompt is None:
        notes.append(PROMPT_TOKENS_NOTE)
    if _are_requests(line):
        notes.append(
            f"several rows of a batch have one of {_ORIGINS}: each is taken as a"
            " request, and its rows as its tokens"
        )
    return Foreign(Unordered(pieces, finish), notes=notes)


def _text_of(path: Path) -> _Text:
    """Find the rows: in lines, behind a header, in it, or in one JSON text."""
    value = first_object(path)
    skip: int | None = 0
    if value is None:
        with decoding(path, "JSON"):
            value = load_json(read_text(path))
        skip = None
    if not isinstance(value, dict) or "top_k" not in value or _has(value, "pos", _KEYS):
        held = [json.dumps(value).encode()] if skip is None else []
        return _Text(value, 0, held, skip)

    with decoding(path, "header: top_k"):
        top_k = int(value["top_k"])
    held = [
        json.dumps(row).encode()
        for part in value.values()
        if isinstance(part, list) and part and isinstance(part[0], list)
        for row in part
    ]
    first = json.loads(held[0]) if held else None
    if skip is not None:
        skip = 1
        numbered = None if held else first_line(path, 1)
        if numbered is not None:
            with decoding(path, f"line {numbered[0]}"):
                first = json.loads(numbered[1])
    return _Text(first, top_k, held, skip)


def _rows(path: Path, text: _Text, keys: Keys) -> Iterator[Rows]:
    """The rows of some lines at a time."""
    if text.first is None:
        raise layout_error(path, "rows", "at least one", "none")
    layout = _layout_of(path, text, keys)
    parts = [json_lines(path, layout.structure, held=text.held)] if text.held else []
    if text.skip is not None:
        parts.append(json_lines(path, layout.structure, text.skip))

    has_weights = None
    for lines in chain.from_iterable(parts):
        line, columns = layout.rows(lines)
        if not len(line):
            continue
        for name in ("pos", "layer", "experts"):
            if columns.get(name) is None:
                raise lines.fault(int(line[0]), name, _ROW)
        columns = {
            name: column for name, column in columns.items() if column is not None
        }
        has_weights = "weights" in columns if has_weights is None else has_weights
        if has_weights != ("weights" in columns):
            raise lines.fault(int(line[0]), "weights", "weights in all rows or in none")

        # A line without a name belongs to sequence 0, as all do where no line has one.
        for name, missing in (("seq", "0"), ("phase", "decode")):
            if name in columns:
                column = columns[name]
                column = column.fill_null(missing) if column.null_count else column
                column = column.dictionary_encode()
                is_by_line = len(column) != len(line)
                columns[name] = column.take(numbers(line)) if is_by_line else column
        yield lines.rows(columns, line)


# -- layouts ---------------------------------------------------------------------------


def _layout_of(path: Path, text: _Text, keys: Keys) -> _Layout:
    """The layout of a file by its first row."""
    first = text.first
    if isinstance(first, list):
        return _lists(text.top_k, nested=bool(first) and isinstance(first[0], list))

    line = first if isinstance(first, dict) else {}
    known = [key for key in keys["pos"] if key in line]
    if known and known[0] == "token" and "step" in known:
        raise layout_error(
            path,
            "rows",
            "one key for the position",
            "token and step",
            "say --map pos=token or --map pos=step",
        )
    if _ORIGINS in line:
        return _batches(line, keys)
    if "layers" in line:
        return _tokens(line, keys)

    def rows(lines: Lines) -> tuple[np.ndarray, dict[str, Any]]:
        columns = lines.columns
        ours = {name: _column(columns, name, keys) for name in keys}
        return np.arange(len(lines.values)), ours

    return _Layout(_structure(line, tuple(keys), keys), rows)


def _structure(
    value: dict[str, Any], names: tuple[str, ...], keys: Keys
) -> dict[str, Any]:
    """The structure of lines like `value`: what it has for each column of `names`."""
    structure: dict[str, Any] = {}
    for name in names:
        used = [key for key in keys[name] if key in value]
        # Looking for a key costs time at every line. Of a column that the first line
        # does not have, a later line may have any.
        structure |= dict.fromkeys(used[:1] or keys[name], _KINDS[name])
    return structure


def _column(columns: dict[str, Any], name: str, keys: Keys) -> Any:
    """The column under the key that the lines have for it; None under none."""
    candidates = [columns[key] for key in keys[name] if key in columns]
    complete = (column for column in candidates if not column.null_count)
    partial = (column for column in candidates if column.null_count < len(column))
    return next(chain(complete, partial), None)


def _tokens(first: dict[str, Any], keys: Keys) -> _Layout:
    """An object per token with its layers: lists of ids, or objects."""
    layers = first["layers"] if isinstance(first["layers"], list) else []
    objects = [layer for layer in layers if isinstance(layer, dict)]
    layer: Any = _KINDS["experts"]
    if objects:
        layer = _structure(objects[0], ("layer", "experts", "weights"), keys)
    structure = _structure(first, ("seq", "phase", "pos"), keys) | {"layers": [layer]}

    def rows(lines: Lines) -> tuple[np.ndarray, dict[str, Any]]:
        columns = lines.columns
        lengths = lengths_of(columns["layers"])
        if not lengths.all():
            raise lines.fault(int(lengths.argmin()), "", "a list of layers")
        line = np.repeat(np.arange(len(lengths)), lengths)
        # A layer without a number is the one whose turn it is.
        turn = numbers(
            (np.arange(len(line)) - (np.cumsum(lengths) - lengths)[line]) * 1.0
        )
        ours = {name: _column(columns, name, keys) for name in ("seq", "phase", "pos")}
        if ours["pos"] is not None:
            ours["pos"] = ours["pos"].take(numbers(line))
        items = items_of(columns["layers"])
        if not objects:
            return line, ours | {"layer": turn, "experts": items}

        parts = columns_of(items)
        for name in ("layer", "experts", "weights"):
            ours[name] = _column(parts, name, keys)
        stated = ours["layer"]
        ours["layer"] = turn if stated is None else stated.fill_null(turn)
        return line, ours

    return _Layout(structure, rows)


def _are_requests(first: dict[str, Any]) -> bool:
    """Whether the rows of the first batch that have one origin are several: its tokens,
    and the origin a request. Else it is the token itself.
    """
    origins = first.get(_ORIGINS)
    origins = origins if isinstance(origins, list) else []
    return len(set(map(str, origins))) < len(origins)


def _batches(first: dict[str, Any], keys: Keys) -> _Layout:
    """An object per layer of a batch: lists of tokens, ids and weights, row by row."""
    structure = _structure(first, ("seq", "phase", "layer"), keys)
    of_rows = _structure(first, ("experts", "weights"), keys)
    structure |= {name: [kind] for name, kind in of_rows.items()}
    structure |= {_ORIGINS: ["DOUBLE"], "batch_id": "VARCHAR"}
    are_requests = _are_requests(first)
    # Rows so far of each request at each layer.
    counts: Counter[tuple[str, float]] = Counter()

    def turn(key: tuple[str, float]) -> float:
        counts[key] += 1
        return counts[key] - 1.0

    def rows(lines: Lines) -> tuple[np.ndarray, dict[str, Any]]:
        columns = lines.columns
        ours = {name: _column(columns, name, keys) for name in keys if name != "pos"}
        lengths = lengths_of(columns[_ORIGINS])
        parts = [
            ours[name] for name in ("experts", "weights") if ours[name] is not None
        ]
        wrong = np.any(
            [lengths == 0, *(lengths_of(part) != lengths for part in parts)], 0
        )
        if wrong.any() or ours["experts"] is None or ours["layer"] is None:
            expected = f"a layer, and as many {_ORIGINS} as rows of experts"
            raise lines.fault(int(wrong.argmax()), "", expected)

        line = np.repeat(np.arange(len(lengths)), lengths)
        ours["pos"] = items_of(columns[_ORIGINS])
        ours["layer"] = ours["layer"].take(numbers(line))
        if ours["seq"] is None:
            ours["seq"] = columns["batch_id"]
        if are_requests:
            batches = ours["seq"].take(numbers(line)).to_pylist()
            origins = ours["pos"].to_pylist()
            names = [f"{a}:{b:g}" for a, b in zip(batches, origins, strict=True)]
            places = zip(names, ours["layer"].to_pylist(), strict=True)
            ours["pos"] = numbers(np.array([turn(place) for place in places]))
            ours["seq"] = pa.array(names)
        for name in ("experts", "weights"):
            if ours[name] is not None:
                ours[name] = items_of(ours[name])
        return line, ours

    return _Layout(structure, rows)


def _lists(top_k: int, *, nested: bool) -> _Layout:
    """Lists ``[layer, e0, …, eK-1]``, or lists of such lists.

    A layer that is not above the one before begins a token.
    """
    width = top_k + 1
    token = -1
    layer_before = np.inf

    def rows(lines: Lines) -> tuple[np.ndarray, dict[str, Any]]:
        nonlocal token, layer_before
        lists_ = lines.values
        line = np.arange(len(lists_))
        if nested:
            line = np.repeat(line, lengths_of(lists_))
            lists_ = items_of(lists_)
        lengths = lengths_of(lists_)
        if not len(lengths):
            return line, {}
        wrong = lengths != width
        if wrong.any() or width < 2:
            expected = f"[layer, {max(top_k, 1)} ids] as in the header"
            raise lines.fault(int(line[wrong.argmax()]), "", expected)

        cells = items_of(lists_)
        if cells.null_count:
            at = int(np.argmax(cells.is_null().to_numpy(zero_copy_only=False)))
            raise lines.fault(int(line[at // width]), "", "numbers")
        table = values(cells).reshape(-1, width)
        layer = table[:, 0]
        pos = token + np.cumsum(layer <= np.concatenate(([layer_before], layer[:-1])))
        token = int(pos[-1])
        layer_before = layer[-1]
        return line, {
            "pos": numbers(pos * 1.0),
            "layer": numbers(layer),
            "experts": lists(np.ascontiguousarray(table[:, 1:])),
        }

    return _Layout([["DOUBLE"]] if nested else ["DOUBLE"], rows)

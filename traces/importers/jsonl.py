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
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.base.inputs import load_json, read_text
from moesim.traces.format.rows import blocks, is_null
from moesim.traces.importers.readers.foreign import (
    NAMES,
    PROMPT_TOKENS,
    RESTARTS,
    Foreign,
    decoding,
    first_line,
    first_object,
    head,
    layout_error,
    one_of,
    prompt_length,
)
from moesim.traces.importers.readers.sequence_rows import counted
from moesim.traces.importers.readers.tables import json_rows, quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from moesim.traces.format.rows import Rows
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.importers.readers.foreign import Mapped

    Block = dict[str, np.ndarray]
    Keys = dict[str, tuple[str, ...]]
    Query = dict[str, Any]

# Our column -> the keys that stand for it, the most explicit first. Beside ``pos``, a
# ``token`` is a token id.
_KEYS: Keys = NAMES | {"pos": (*NAMES["pos"], "token", "t", "step")}
MAPPED = tuple(_KEYS)
OPTIONS = {"prompt_tokens": PROMPT_TOKENS, "restarts": RESTARTS}
_KINDS: dict[str, Any] = {
    "seq": "VARCHAR",
    "phase": "VARCHAR",
    "pos": "DOUBLE",
    "layer": "DOUBLE",
    "experts": ["DOUBLE"],
    "weights": ["DOUBLE"],
}
_ORIGINS = "origin_rows"


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


def recognises(path: Path, names: Mapped) -> bool:
    """Whether the first line is a row, a token with layers, or an object with
    ``top_k``; or one such object in all.
    """
    first = first_object(path)
    if isinstance(first, dict):
        keys = _keys(names)
        is_row = _has(first, "layer", keys) and _has(first, "experts", keys)
        is_placed = _has(first, "pos", keys) or _ORIGINS in first
        return "top_k" in first or (is_placed and ("layers" in first or is_row))

    start = head(path, 512).lstrip()
    return start.startswith(b"{") and (b'"top_k"' in start or b'"layers"' in start)


def _keys(names: Mapped) -> Keys:
    return _KEYS | {name: (key,) for name, key in names.items()}


def _has(value: dict[str, Any], name: str, keys: Keys) -> bool:
    return any(key in value for key in keys[name])


def read(path: Path, _: ModelShape, names: Mapped, **given: str) -> Foreign:
    """The file's rows."""
    text = _text_of(path)
    # The first row speaks for all; a mixture is refused while reading.
    if text.first is None:
        raise layout_error(path, "rows", "at least one", "none")
    line = text.first if isinstance(text.first, dict) else {}
    notes = []
    if _are_requests(line):
        notes.append(
            f"several rows of a batch have one of {_ORIGINS}: each is taken as a"
            " request, and its rows as its tokens"
        )
    return Foreign(
        lambda: _rows(path, text, _keys(names)),
        prompt=prompt_length(path, given),
        passes=bool(one_of(path, given, "restarts", ("passes",))),
        notes=notes,
    )


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


def _rows(path: Path, text: _Text, keys: Keys) -> Iterator[Block]:
    """The rows of some lines at a time."""
    first = text.first if isinstance(text.first, dict) else {}
    if isinstance(text.first, list):
        query = _lists(text)
    elif _ORIGINS in first:
        query = _batches(first, keys)
    elif "layers" in first:
        query = _tokens(first, keys)
    else:
        query = _plain(path, first, keys)

    read = partial(json_rows, path, **query)
    parts = [read(held=text.held)] if text.held else []
    if text.skip is not None:
        parts.append(read(skip=text.skip))
    known = _known(first, keys)
    rows = blocks(_alike(rows, known) for rows in chain.from_iterable(parts))
    if isinstance(text.first, list):
        return _by_layer(rows)
    return counted(rows, "seq", "layer") if _are_requests(first) else rows


def _known(first: dict[str, Any], keys: Keys) -> set[str]:
    """Which columns the first row has."""
    layers = first.get("layers")
    layer = layers[0] if isinstance(layers, list) and layers else None
    parts = [first, layer] if isinstance(layer, dict) else [first]
    return {
        name
        for name, names in keys.items()
        if any(part.get(key) is not None for part in parts for key in names)
    }


def _alike(rows: Rows, known: set[str]) -> Rows:
    """Rows without what none of them has.

    Raises:
        TraceError: some have a phase or weights, others have none.
    """
    columns = dict(rows.columns)
    for name in {"phase", "weights"} & columns.keys() - known:
        (column,) = columns.pop(name)
        if column.null_count < len(column):
            row = int(is_null(column).argmin())
            raise rows.fault(row, name, f"{name} in all rows or in none", "some")
    return rows._replace(columns=columns)


def _by_layer(blocks_: Iterable[Block]) -> Iterator[Block]:
    """Rows of one sequence: a layer that is not above the one before begins a token."""
    token = -1
    before = np.inf
    for block in blocks_:
        layer = block["layer"]
        falls = layer <= np.concatenate(([before], layer[:-1]))
        pos = token + np.cumsum(falls)
        token = pos[-1]
        before = layer[-1]
        yield {**block, "pos": pos}


# -- layouts ---------------------------------------------------------------------------
# What `json_rows` is asked for, of lines like the first row.


def _fields(
    value: dict[str, Any], of: str, keys: Keys, *names: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """The structure of objects like `value`, and our columns of their fields in SQL."""
    structure: dict[str, Any] = {}
    columns = {}
    for name in names:
        # Looking for a key costs time at every line. Of a column that the first line
        # does not have, a later line may have any.
        used = [key for key in keys[name] if key in value][:1] or keys[name]
        structure |= dict.fromkeys(used, _KINDS[name])
        columns[name] = f"coalesce({', '.join(f'{of}.{quote(key)}' for key in used)})"
    # A line without a name belongs to sequence 0, as all do where no line has one.
    if "seq" in names:
        columns["seq"] = f"coalesce({columns['seq']}, '0')"
    return structure, columns


def _plain(path: Path, first: dict[str, Any], keys: Keys) -> Query:
    """An object for each row."""
    known = [key for key in keys["pos"] if key in first]
    if known and known[0] == "token" and "step" in known:
        raise layout_error(
            path,
            "rows",
            "one key for the position",
            "token and step",
            "say --map pos=token or --map pos=step",
        )
    structure, columns = _fields(first, "line", keys, *_KINDS)
    return {"structure": structure, "columns": columns}


def _tokens(first: dict[str, Any], keys: Keys) -> Query:
    """An object per token with its layers: lists of ids, or objects. A layer without a
    number is the one whose turn it is.
    """
    structure, columns = _fields(first, "line", keys, "seq", "phase", "pos")
    layers = first["layers"] if isinstance(first["layers"], list) else []
    objects = [layer for layer in layers if isinstance(layer, dict)]
    kind: Any = _KINDS["experts"]
    of_layer = {"layer": "NULL", "experts": "each"}
    if objects:
        names = ("layer", "experts", "weights")
        kind, of_layer = _fields(objects[0], "each", keys, *names)
    columns |= of_layer | {"layer": f"coalesce({of_layer['layer']}, turn - 1)"}
    return {
        "structure": structure | {"layers": [kind]},
        "columns": columns,
        "each": "line.layers",
        "needed": "a list of layers, with ids of experts each",
    }


def _are_requests(first: dict[str, Any]) -> bool:
    """Whether the rows of the first batch that have one origin are several: its tokens,
    and the origin a request. Else it is the token itself.
    """
    origins = first.get(_ORIGINS)
    origins = origins if isinstance(origins, list) else []
    return len(set(map(str, origins))) < len(origins)


def _batches(first: dict[str, Any], keys: Keys) -> Query:
    """An object per layer of a batch: lists of tokens, ids and weights, row by row."""
    origins = f"line.{_ORIGINS}"
    names = ("seq", "phase", "layer", "experts", "weights")
    structure, columns = _fields(first, "line", keys, *names)
    for name in ("experts", "weights"):
        for key in keys[name]:
            if key in structure:
                structure[key] = [structure[key]]
        rows = columns[name]
        columns[name] = f"CASE WHEN len({rows}) = len({origins}) THEN {rows}[turn] END"
    structure |= {_ORIGINS: ["DOUBLE"], "batch_id": "VARCHAR"}
    if not _has(first, "seq", keys):
        columns["seq"] = "coalesce(line.batch_id, '0')"
    if _are_requests(first):
        columns["seq"] += " || ':' || each"
    else:
        columns["pos"] = "each"
    return {
        "structure": structure,
        "columns": columns,
        "each": origins,
        "needed": f"a layer, and as many {_ORIGINS} as rows of experts",
    }


def _lists(text: _Text) -> Query:
    """Lists ``[layer, e0, …, eK-1]``, or lists of such lists."""
    is_nested = bool(text.first) and isinstance(text.first[0], list)
    row = "each" if is_nested else "line"
    ids = f"CASE WHEN len({row}) = {text.top_k + 1} THEN {row}[2:] END"
    return {
        "structure": [["DOUBLE"]] if is_nested else ["DOUBLE"],
        "columns": {"layer": f"{row}[1]", "experts": ids},
        "each": "line" if is_nested else "",
        "needed": f"[layer, {text.top_k} ids] as in the header",
    }

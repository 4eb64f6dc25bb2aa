"""JSONL of routing, one object or list per line: by token and layer, or by token with a list of layers.

Three layouts: ``{layer_idx, token_idx, selected_ids, gate_weights}`` (lattice; also with `seq` and `phase`);
``{token, layers: [[ids], …]}`` or ``{pos, layers: [{experts, weights}, …]}``; and lists ``[layer, e0, …, eK-1]``
behind an object with ``top_k`` (imp), in lines or as one object that holds them all.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from traces.foreign import (
    NO_PHASES,
    bad,
    decoding,
    first_object,
    head,
    json_table,
    list_rows,
    long_blocks,
    whole_number,
)
from traces.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from traces.schema import ModelShape

    Block = dict[str, np.ndarray]

OPTIONS = {"prompt_tokens": "how many of the first tokens of every sequence are prompt"}
_NAMES = {
    "seq": ("seq", "seq_id", "sequence", "request"),
    "pos": ("pos", "position", "token_idx", "token_index", "token", "step"),
    "layer": ("layer", "layer_idx", "layer_id"),
    "experts": ("experts", "selected_ids", "expert_ids", "ids", "topk_ids"),
    "weights": ("weights", "gate_weights", "expert_weights"),
    "phase": ("phase",),
}
_PHASES = {"prefill": Phase.PREFILL, "prompt": Phase.PREFILL, "decode": Phase.DECODE, "generate": Phase.DECODE}


class _Row(NamedTuple):
    seq: Any
    pos: int
    phase: Any
    layer: int
    experts: list[int]
    weights: list[float] | None


def recognises(path: Path) -> bool:
    """Whether the first line is a row, a token with layers, or an object with ``top_k``; or one such object in all."""
    first = first_object(path)
    if isinstance(first, dict):
        has = {name: _key(first, name) is not None for name in _NAMES}
        return "top_k" in first or (has["pos"] and ("layers" in first or (has["layer"] and has["experts"])))
    start = head(path, 512).lstrip()
    return start.startswith(b"{") and (b'"top_k"' in start or b'"layers"' in start)


def provenance(path: Path, *, prompt_tokens: str = "") -> dict[str, Any]:
    """Remarks on what is missing."""
    first = next(_rows(path))
    notes = [] if first.weights is not None else ["no combine weights in the source"]
    if first.phase is None and not prompt_tokens:
        notes.append(f"{NO_PHASES}: all are taken as generated; option prompt_tokens=N says more")
    return {"notes": notes}


def read(path: Path, shape: ModelShape, *, prompt_tokens: str = "") -> Iterator[Block]:
    """Blocks of one sequence each; needs the file's rows in memory."""
    rows = _at_once(path)
    if rows is None:
        rows = _line_by_line(path)
    if prompt_tokens:
        prompt = whole_number(path, "prompt_tokens", prompt_tokens, 0)
        rows["phase"] = np.where(rows["pos"] < prompt, np.int8(Phase.PREFILL), np.int8(Phase.DECODE))
    yield from long_blocks(path, rows, shape, ("phase",))


def _at_once(path: Path) -> Block | None:
    """Rows of a file whose every line is a row with the same keys as the first; None otherwise."""
    first = first_object(path)
    if not isinstance(first, dict) or "layers" in first:
        return None
    keys = {name: _key(first, name) for name in ("pos", "layer", "experts", "weights")}
    if None in (keys["pos"], keys["layer"], keys["experts"]) or _key(first, "seq") or _key(first, "phase"):
        return None
    types = {"experts": pa.list_(pa.int32()), "weights": pa.list_(pa.float32())}
    fields = [pa.field(key, types.get(name, pa.int32())) for name, key in keys.items() if key]
    others = [key for name in _NAMES for key in _NAMES[name] if name in ("seq", "phase", "weights", "experts")]
    others += [key for name in ("pos", "layer") for key in _NAMES[name][: _NAMES[name].index(str(keys[name]))]]
    strange = [pa.field(key, pa.string()) for key in others if key not in keys.values()]
    table = json_table(path, pa.schema([*fields, *strange, pa.field("layers", pa.string())]), [f.name for f in fields])
    if table is None or any(table.column(f.name).null_count < table.num_rows for f in strange):
        return None
    rows = {name: np.asarray(table.column(key).chunk(0)) for name, key in keys.items() if key and name not in types}
    lists = {name: list_rows(table, key) for name, key in keys.items() if key and name in types}
    for name, parts in lists.items():
        if parts is None or not parts[0][0] or (parts[0] != parts[0][0]).any():
            return None
        rows[name] = parts[1].reshape(table.num_rows, -1)
    odd = min(rows["pos"].min(), rows["layer"].min(), rows["experts"].min()) < 0
    if odd or ("weights" in rows and rows["weights"].shape != rows["experts"].shape):
        return None
    return {"seq": np.zeros(table.num_rows, np.int64), **rows}


def _line_by_line(path: Path) -> Block:
    """Rows of a file of any of the layouts; what is wrong is named."""
    labels: dict[Any, int] = {}
    seq: list[int] = []
    pos: list[Any] = []
    layer: list[Any] = []
    phase: list[int] = []
    experts: list[list[Any]] = []
    weights: list[list[float]] = []
    for number, row in enumerate(_rows(path)):
        if not isinstance(row.experts, list):
            raise bad(path, f"row {number}: experts", "a list of ids", row.experts)
        if len(row.experts) != len(experts[0] if experts else row.experts) or not row.experts:
            raise bad(
                path, f"row {number}: experts", f"{len(experts[0]) if experts else 'at least 1'}", len(row.experts)
            )
        if (row.weights is None) != (not weights if experts else row.weights is None):
            raise bad(path, f"row {number}: weights", "weights in all rows or in none", "a mixture")
        seq.append(labels.setdefault(str(row.seq), len(labels)))
        pos.append(row.pos)
        layer.append(row.layer)
        experts.append(row.experts)
        if row.weights is not None:
            weights.append(row.weights)
        code = Phase.DECODE if row.phase is None else _PHASES.get(str(row.phase))
        if code is None:
            raise bad(path, f"row {number}: phase", "prefill or decode", row.phase)
        phase.append(code)
    with decoding(path, "rows"):
        rows = {
            "seq": np.array(seq),
            "pos": _whole(path, "pos", pos),
            "layer": _whole(path, "layer", layer),
            "phase": np.array(phase, np.int8),
            "experts": _whole(path, "experts", experts),
        }
        if weights:
            rows["weights"] = np.array(weights, np.float32)
            if rows["weights"].shape != rows["experts"].shape:
                raise bad(
                    path, "weights", f"one per expert: {list(rows['experts'].shape)}", list(rows["weights"].shape)
                )
    return rows


def _whole(path: Path, name: str, values: list[Any]) -> np.ndarray:
    array = np.array(values)
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= 1 << 31:
        found = f"{array.min()}..{array.max()}" if array.dtype.kind in "iu" else f"{array.dtype}"
        raise bad(path, name, "whole numbers from 0", found)
    return array


def _key(row: dict[str, Any], name: str) -> str | None:
    return next((key for key in _NAMES[name] if key in row), None)


def _rows(path: Path) -> Iterator[_Row]:
    """Every (token, layer) of the file, in file order."""
    found = False
    place = _Place()
    for number, value in _values(path):
        with decoding(path, f"line {number}"):
            for row in _of(path, number, value, place):
                found = True
                yield row
    if not found:
        raise bad(path, "rows", "at least one", "none")


class _Place:
    """Where a list of ``[layer, ids]`` stands: a layer that is not higher than the last one begins a token."""

    def __init__(self) -> None:
        self.token, self.layer, self.top_k = -1, -1, 0

    def row(self, path: Path, number: int, value: list[Any]) -> _Row:
        """One row of a list."""
        layer, *experts = value
        if self.top_k and len(experts) != self.top_k:
            raise bad(path, f"line {number}", f"[layer, {self.top_k} ids] as in the header", f"{len(experts)} ids")
        if self.token < 0 or layer <= self.layer:
            self.token += 1
        self.layer = layer
        return _Row(0, self.token, None, layer, experts, None)


def _of(path: Path, number: int, value: Any, place: _Place) -> Iterator[_Row]:
    """The rows in one JSON value."""
    if isinstance(value, list):
        for one in value if value and isinstance(value[0], list) else [value]:
            yield place.row(path, number, one)
    elif not isinstance(value, dict):
        raise bad(path, f"line {number}", "an object or a list", type(value).__name__)
    elif "top_k" in value and _key(value, "pos") is None:
        place.top_k = int(value["top_k"])
        for one in value.values():
            if isinstance(one, list) and one and isinstance(one[0], list):
                yield from _of(path, number, one, place)
    else:
        yield from _of_token(path, number, value)


def _of_token(path: Path, number: int, value: dict[str, Any]) -> Iterator[_Row]:
    """The rows of an object that names its token: one layer, or all of them."""
    names = {name: _key(value, name) for name in _NAMES}
    if names["pos"] is None:
        raise bad(path, f"line {number}", "a position (pos, token, token_idx)", ", ".join(value))
    common = (value[names["seq"]] if names["seq"] else 0, value[names["pos"]], value.get("phase"))
    if "layers" not in value:
        if names["layer"] is None or names["experts"] is None:
            raise bad(path, f"line {number}", "a layer and its experts", ", ".join(value))
        weights = value[names["weights"]] if names["weights"] else None
        yield _Row(*common, value[names["layer"]], value[names["experts"]], weights)
        return
    for index, one in enumerate(value["layers"]):
        if not isinstance(one, dict):
            yield _Row(*common, index, one, None)
            continue
        keys = {name: _key(one, name) for name in _NAMES}
        layer = one[keys["layer"]] if keys["layer"] else index
        yield _Row(*common, layer, one[keys["experts"] or "experts"], one.get(keys["weights"] or "weights"))


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    """JSON values line by line, or the whole file as one value."""
    if first_object(path) is None:
        with decoding(path, "JSON"):
            value = json.loads(path.read_text(encoding="utf-8"))
        yield 1, value
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                with decoding(path, f"line {number}"):
                    value = json.loads(line)
                yield number, value

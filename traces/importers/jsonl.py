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

from traces.arrow import codes, flat, values
from traces.foreign import (
    NO_PHASES,
    bad,
    decoding,
    finished,
    first_object,
    head,
    json_table,
    line_chunks,
    whole_number,
)
from traces.schema import Phase
from traces.sorting import Appearance, Unordered

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
    first = next(_rows(path), None)
    if first is None:
        raise bad(path, "rows", "at least one", "none")
    notes = [] if first.weights is not None else ["no combine weights in the source"]
    if first.phase is None and not prompt_tokens:
        notes.append(f"{NO_PHASES}: all are taken as generated; option prompt_tokens=N says more")
    return {"notes": notes}


def read(path: Path, shape: ModelShape, *, prompt_tokens: str = "") -> Unordered:
    """The file's rows."""
    prompt = whole_number(path, "prompt_tokens", prompt_tokens, 0) if prompt_tokens else None
    return Unordered(lambda: _pieces(path, prompt), lambda block: finished(path, shape, block, ("phase",)))


def _pieces(path: Path, prompt: int | None) -> Iterator[Block]:
    """Rows of some lines at a time: parsed by Arrow, or one by one where a line is unlike the first."""
    sequences, slow = Appearance(), _LineByLine(path)
    fast = _Alike.of(first_object(path))
    first: Block | None = None
    rows = 0
    for number, data in _chunks(path):
        block = fast.rows(data, sequences) if fast is not None else slow.place.rows(data)
        if block is None:
            block = slow.rows(number, data, rows, sequences)
        if block is None:
            continue
        first = block if first is None else first
        for name in ("experts", "weights"):
            widths = [one[name].shape[1] if name in one else 0 for one in (first, block)]
            if widths[0] != widths[1]:
                raise bad(path, f"line {number}: {name}", f"{widths[0]} as in the first row", widths[1])
        if prompt is not None:
            block["phase"] = np.where(block["pos"] < prompt, np.int8(Phase.PREFILL), np.int8(Phase.DECODE))
        yield block
        rows += len(block["pos"])
    if first is None:
        raise bad(path, "rows", "at least one", "none")


def _chunks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines of the file with the number of the first, or the whole file as one line."""
    if first_object(path) is None:
        with decoding(path, "JSON"):
            yield 1, json.dumps(json.loads(path.read_text(encoding="utf-8"))).encode()
        return
    told = first_object(path)
    header = isinstance(told, dict) and "top_k" in told and _key(told, "pos") is None
    for number, data in line_chunks(path):
        if header and number == 1:  # lists follow
            first, _, rest = data.lstrip().partition(b"\n")
            yield number, first
            yield number + 1 + data[: len(data) - len(data.lstrip())].count(b"\n"), rest
        else:
            yield number, data


class _Alike(NamedTuple):
    """Lines that are objects with the same keys as the first one: rows, or tokens with lists of layers."""

    keys: dict[str, str]  # ours -> theirs, outside ``layers``
    inner: dict[str, str] | None  # the same inside ``layers``; empty where those hold bare lists
    schema: pa.Schema
    strange: list[str]

    @classmethod
    def of(cls, first: Any) -> _Alike | None:
        """What the first line promises; None for a layout that is not read this way."""
        if not isinstance(first, dict):
            return None
        told = {name: key for name in _NAMES if (key := _key(first, name))}
        inner: dict[str, str] | None = None
        if "layers" in first:
            told = {name: key for name, key in told.items() if name in ("seq", "pos", "phase")}
            one = first["layers"][0] if isinstance(first["layers"], list) and first["layers"] else None
            if not isinstance(one, dict | list):
                return None
            inner = (
                {name: key for name in ("layer", "experts", "weights") if (key := _key(one, name))}
                if isinstance(one, dict)
                else {}
            )
            if "pos" not in told or (inner and "experts" not in inner):
                return None
        elif not {"pos", "layer", "experts"} <= set(told) or "top_k" in told:
            return None
        named = isinstance(first.get(told.get("seq", "")), str)
        ids, weights, seq = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.string() if named else pa.int64()
        types = {"seq": seq, "phase": pa.string(), "experts": ids, "weights": weights}
        types |= {"pos": pa.int32(), "layer": pa.int32()}
        fields = [pa.field(key, types[name]) for name, key in told.items()]
        if inner is not None:
            item = pa.struct([pa.field(key, types[name]) for name, key in inner.items()]) if inner else types["experts"]
            fields.append(pa.field("layers", pa.list_(item)))
        known = {key for name in _NAMES for key in _NAMES[name]} | {"layers", "top_k"}
        strange = sorted(known - {field.name for field in fields})
        return cls(told, inner, pa.schema([*fields, *(pa.field(key, pa.string()) for key in strange)]), strange)

    def rows(self, data: bytes, sequences: Appearance) -> Block | None:
        """The rows of some lines; None where a line is another one than promised."""
        needed = [field.name for field in self.schema if field.name not in self.strange]
        table = json_table(data, self.schema, needed)
        if table is None or any(table.column(name).null_count < table.num_rows for name in self.strange):
            return None
        found = {ours: table.column(theirs).chunk(0) for ours, theirs in self.keys.items()}
        if self.inner is not None and not self._spread(found, table.column("layers").chunk(0)):
            return None
        phase = codes(found.pop("phase"), list(_PHASES)) if "phase" in found else None
        label = found.pop("seq", None)
        block: Block = {}
        for ours, array in found.items():
            column = _matrix(array) if ours in ("experts", "weights") else np.asarray(array)
            if column is None or not len(column) or (ours != "weights" and column.min() < 0):
                return None
            block[ours] = column
        count, wide = len(block["pos"]), block["experts"].shape
        odd = block["experts"].max() >= 1 << 16 or block.get("weights", block["experts"]).shape != wide
        if odd or (phase is not None and (phase < 0).any()):
            return None
        block["experts"] = block["experts"].astype(np.uint16)
        block["seq"] = np.zeros(count, np.int32) if label is None else _numbered(label, sequences)
        known = np.array(list(_PHASES.values()), np.int8)
        block["phase"] = np.full(count, Phase.DECODE, np.int8) if phase is None else known[phase]
        return block

    def _spread(self, found: dict[str, Any], layers: Any) -> bool:
        """Rows of lists of layers; False where a list has a null."""
        items = flat(layers)
        if items.null_count:
            return False
        sizes = np.diff(values(layers.offsets))
        token = np.repeat(np.arange(len(sizes)), sizes)
        for name in list(found):
            found[name] = found[name].take(pa.array(token))
        inner = {name: items.field(key) for name, key in (self.inner or {}).items()} or {"experts": items}
        if any(array.null_count for array in inner.values()):
            return False
        if "layer" not in inner:
            found["layer"] = np.arange(len(token), dtype=np.int32) - np.repeat(np.cumsum(sizes) - sizes, sizes).astype(
                np.int32
            )
        found |= inner
        return True


def _matrix(array: Any) -> np.ndarray | None:
    """[N, K] of a list array; None where lists differ in length or have nulls."""
    inner, lengths = flat(array), np.diff(values(array.offsets))
    if inner.null_count or not len(lengths) or not lengths[0] or (lengths != lengths[0]).any():
        return None
    return np.asarray(inner).reshape(len(lengths), -1)


def _numbered(label: Any, sequences: Appearance) -> np.ndarray:
    """Numbers of sequences by their names as words."""
    encoded = label.dictionary_encode()
    return sequences.of_labels([str(one) for one in encoded.dictionary.to_pylist()], np.asarray(encoded.indices))


class _LineByLine:
    """Rows of any of the layouts; what is wrong is named."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, _Place()

    def rows(self, number: int, data: bytes, start: int, sequences: Appearance) -> Block | None:
        """The rows of the lines in `data` from line `number`, row `start` on; None where there are none."""
        path, found = self.path, list[_Row]()
        for line, text in enumerate(data.splitlines(), start=number):
            if text.strip():
                with decoding(path, f"line {line}"):
                    found += _of(path, line, json.loads(text), self.place)
        if not found:
            return None
        first = found[0]
        phases = np.array([self._phase(start + index, row, first) for index, row in enumerate(found)], np.int8)
        labels: dict[str, int] = {}
        index = np.array([labels.setdefault(str(row.seq), len(labels)) for row in found])
        with decoding(path, "rows"):
            block = {
                "seq": sequences.of_labels(list(labels), index),
                "pos": _whole(path, "pos", [row.pos for row in found]),
                "layer": _whole(path, "layer", [row.layer for row in found]),
                "experts": _whole(path, "experts", [row.experts for row in found], 1 << 16).astype(np.uint16),
                "phase": phases,
            }
            if first.weights is not None:
                block["weights"] = np.array([row.weights for row in found], np.float32)
                if block["weights"].shape != block["experts"].shape:
                    shapes = [list(block[name].shape) for name in ("experts", "weights")]
                    raise bad(path, "weights", f"one per expert: {shapes[0]}", shapes[1])
        return block

    def _phase(self, number: int, row: _Row, first: _Row) -> Phase:
        """The phase of a row that is made like `first`."""
        path, where = self.path, f"row {number}"
        if not isinstance(row.experts, list):
            raise bad(path, f"{where}: experts", "a list of ids", row.experts)
        if len(row.experts) != len(first.experts) or not row.experts:
            raise bad(path, f"{where}: experts", len(first.experts) or "at least 1", len(row.experts))
        if (row.weights is None) != (first.weights is None):
            raise bad(path, f"{where}: weights", "weights in all rows or in none", "a mixture")
        code = Phase.DECODE if row.phase is None else _PHASES.get(str(row.phase))
        if code is None:
            raise bad(path, f"{where}: phase", "prefill or decode", row.phase)
        return code


def _whole(path: Path, name: str, values: list[Any], limit: int = 1 << 31) -> np.ndarray:
    array = np.array(values)
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= limit:
        found = f"{array.min()}..{array.max()}" if array.dtype.kind in "iu" else f"{array.dtype}"
        raise bad(path, name, "whole numbers from 0", found)
    return array.astype(np.int32)


def _key(row: dict[str, Any], name: str) -> str | None:
    return next((key for key in _NAMES[name] if key in row), None)


def _rows(path: Path) -> Iterator[_Row]:
    """Every (token, layer) of the file, in file order."""
    place = _Place()
    for number, data in _chunks(path):
        for line, text in enumerate(data.splitlines(), start=number):
            if text.strip():
                with decoding(path, f"line {line}"):
                    yield from _of(path, line, json.loads(text), place)


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

    def rows(self, data: bytes) -> Block | None:
        """Lines that are all such lists; None where one is not."""
        if not data.startswith(b"["):
            return None
        lines = b'{"row":' + data.strip().replace(b"\n", b'}\n{"row":') + b"}"
        table = json_table(lines, pa.schema([pa.field("row", pa.list_(pa.int32()))]), ["row"])
        found = None if table is None else _matrix(table.column("row").chunk(0))
        if found is None or found.shape[1] != (self.top_k or found.shape[1] - 1) + 1 or found.min() < 0:
            return None
        layer, experts = found[:, 0], found[:, 1:]
        if not experts.size or experts.max() >= 1 << 16:
            return None
        begins = np.concatenate(([self.token < 0 or layer[0] <= self.layer], np.diff(layer) <= 0))
        pos = self.token + np.cumsum(begins)
        self.token, self.layer = int(pos[-1]), int(layer[-1])
        return {
            "seq": np.zeros(len(pos), np.int32), "pos": pos.astype(np.int32), "layer": layer,
            "experts": experts.astype(np.uint16), "phase": np.full(len(pos), Phase.DECODE, np.int8),
        }  # fmt: skip


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

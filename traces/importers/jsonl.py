"""JSONL of routing, one object or list per line: by token and layer, or by token with a
list of layers.

Three layouts: ``{layer_idx, token_idx, selected_ids, gate_weights}`` (lattice; also
with `seq` and `phase`); ``{token, layers: [[ids], …]}`` or ``{pos, layers: [{experts,
weights}, …]}``; and lists ``[layer, e0, …, eK-1]`` behind an object with ``top_k``
(imp), in lines or as one object that holds them all.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from moesim.traces.errors import TraceError
from moesim.traces.format.schema import Phase
from moesim.traces.format.sorting import Appearance, Unordered, joined, taken
from moesim.traces.importers.readers.foreign import (
    DAMAGE,
    NO_PHASES,
    NO_WEIGHTS,
    bad,
    decoding,
    finished,
    first_object,
    head,
    line_chunks,
    whole_number,
)
from moesim.traces.importers.readers.number_scanner import Ref, Scanner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.importers.readers.number_scanner import Alike, Lines

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
_PHASES = {
    "prefill": Phase.PREFILL,
    "prompt": Phase.PREFILL,
    "decode": Phase.DECODE,
    "generate": Phase.DECODE,
}


class _Row(NamedTuple):
    seq: Any
    pos: int
    phase: Any
    layer: int
    experts: list[int]
    weights: list[float] | None


def recognises(path: Path) -> bool:
    """Whether the first line is a row, a token with layers, or an object with
    ``top_k``; or one such object in all.
    """
    first = first_object(path)
    if isinstance(first, dict):
        has = {name: _key(first, name) is not None for name in _NAMES}
        return "top_k" in first or (
            has["pos"] and ("layers" in first or (has["layer"] and has["experts"]))
        )
    start = head(path, 512).lstrip()
    return start.startswith(b"{") and (b'"top_k"' in start or b'"layers"' in start)


def provenance(path: Path, *, prompt_tokens: str = "") -> dict[str, Any]:
    """Remarks on what is missing."""
    first = next(_rows(path), None)
    if first is None:
        raise bad(path, "rows", "at least one", "none")
    notes = [] if first.weights is not None else [NO_WEIGHTS]
    if first.phase is None and not prompt_tokens:
        notes.append(
            f"{NO_PHASES}: all are taken as generated; option prompt_tokens=N says more"
        )
    return {"notes": notes}


def read(path: Path, shape: ModelShape, *, prompt_tokens: str = "") -> Unordered:
    """The file's rows."""
    prompt = (
        whole_number(path, "prompt_tokens", prompt_tokens, 0) if prompt_tokens else None
    )
    return Unordered(
        lambda: _pieces(path, prompt),
        lambda block: finished(path, shape, block, ("phase",)),
    )


def _pieces(path: Path, prompt: int | None) -> Iterator[Block]:
    """Rows of some lines at a time: at once, or one by one where a line is odd."""
    sequences = Appearance()
    slow = _LineByLine(path)
    fast = _Alike(path, slow.place)
    first: Block | None = None
    rows = 0
    for number, data in _chunks(path):
        block = fast.rows(data, sequences) or slow.rows(number, data, rows, sequences)
        if block is None:
            continue
        first = block if first is None else first
        for name in ("experts", "weights"):
            widths = [
                one[name].shape[1] if name in one else 0 for one in (first, block)
            ]
            if widths[0] != widths[1]:
                raise bad(
                    path,
                    f"line {number}: {name}",
                    f"{widths[0]} as in the first row",
                    widths[1],
                )
        if prompt is not None:
            block["phase"] = np.where(
                block["pos"] < prompt, np.int8(Phase.PREFILL), np.int8(Phase.DECODE)
            )
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


class _Layout(NamedTuple):
    """Where lines of one form keep their R rows; values by number, [R] or [R, K]. A
    string's is that of its line.
    """

    seq: int | None
    pos: np.ndarray | None  # None for lists, whose place follows from their layers
    phase: int | None
    layer: np.ndarray
    told_layer: bool  # otherwise `layer` holds layers
    experts: np.ndarray
    weights: np.ndarray | None

    @classmethod
    def of(cls, path: Path, value: Any) -> _Layout | None:
        """The layout of a line whose values are `Ref`; None for one that is not read
        this way.
        """
        if isinstance(value, list):
            if len(value) < 2 or not Ref.are_numbers(value):
                return None
            return cls(
                None, None, None, np.array(value[:1]), True, np.array([value[1:]]), None
            )
        if not isinstance(value, dict) or _key(value, "pos") is None:
            return None
        rows = list(_of_token(path, 0, value))
        if not rows or not isinstance(rows[0].experts, list):
            return None
        first = rows[0]
        told = {type(row.layer) for row in rows}
        seq = first.seq if type(first.seq) is Ref else None
        phase = first.phase if type(first.phase) is Ref and first.phase < 0 else None
        lists = [row.experts for row in rows] + [
            row.weights for row in rows if row.weights is not None
        ]
        if (
            not Ref.are_numbers(
                [first.pos, *(row.layer for row in rows if told == {Ref})]
            )
            or len(told) > 1
            or (seq is None) != (_key(value, "seq") is None)
            or (phase is None) != (first.phase is None)
            or len(lists) not in (len(rows), 2 * len(rows))
            or any(
                not isinstance(one, list)
                or len(one) != len(first.experts)
                or not Ref.are_numbers(one)
                for one in lists
            )
            or not first.experts
        ):
            return None
        return cls(
            seq,
            np.full(len(rows), first.pos),
            phase,
            np.array([row.layer for row in rows]),
            told == {Ref},
            np.array(lists[: len(rows)]),
            np.array(lists[len(rows) :]) if len(lists) > len(rows) else None,
        )


class _Alike:
    """Rows of lines whose form was met before, at once."""

    def __init__(self, path: Path, place: _Place) -> None:
        self._path = path
        self._place = place
        self._scanner = Scanner()
        self._known: dict[int, _Layout | None] = {}

    def rows(self, data: bytes, sequences: Appearance) -> Block | None:
        """The rows of some lines; None where one is not read this way, or there is
        none.
        """
        lines = self._scanner.scan(data)
        if lines is None:
            return None
        parts: list[Block] = []
        at: list[np.ndarray] = []
        for alike in lines.forms():
            if (
                not alike.number.shape[1]
                and not lines.filled(int(alike.lines[0])).strip()
            ):
                continue
            layout = self._layout(lines, int(alike.lines[0]))
            block = None if layout is None else _block(lines, alike, layout)
            if (
                layout is None
                or block is None
                or (parts and set(block) != set(parts[0]))
            ):
                return None
            parts.append(block)
            at.append(np.repeat(alike.lines, len(layout.layer)))
        if not parts or len({part["experts"].shape[1] for part in parts}) > 1:
            return None
        block = joined(parts)
        if len(parts) > 1:
            order = np.argsort(np.concatenate(at), kind="stable")
            block = taken(block, order)
        if "pos" not in block and not self._place.rows(block):
            return None
        count = len(block["pos"])
        text = block.pop("text", None)
        block["seq"] = (
            np.zeros(count, np.int32)
            if text is None
            else sequences.of_labels(*lines.labels(text))
        )
        return block

    def _layout(self, lines: Lines, line: int) -> _Layout | None:
        """What a line's form means, found out at the first of its kind."""
        form = int(lines.found.form[line])
        if form not in self._known:
            try:
                self._known[form] = _Layout.of(self._path, lines.meaning(line))
            except (TraceError, *DAMAGE):
                self._known[form] = None
        return self._known[form]


def _block(lines: Lines, alike: Alike, layout: _Layout) -> Block | None:
    """The rows of lines of one form, ``text`` in place of seq; None where a value is
    not what its column holds.
    """
    shape = len(alike.lines), *layout.experts.shape
    experts = alike.integers(layout.experts, np.uint16)
    layer = (
        alike.integers(layout.layer)
        if layout.told_layer
        else np.tile(layout.layer, (shape[0], 1))
    )
    if experts is None or layer is None:
        return None
    block: Block = {
        "layer": layer.reshape(-1).astype(np.int32),
        "experts": experts.reshape(-1, shape[2]),
    }
    if layout.pos is not None:
        pos = alike.integers(layout.pos)
        if pos is None:
            return None
        block["pos"] = pos.reshape(-1)
    phase = np.full(shape[0], Phase.DECODE, np.int8)
    if layout.phase is not None:
        names, index = lines.labels(alike.at + ~layout.phase)
        if not set(names) <= set(_PHASES):
            return None
        phase = np.array([_PHASES[str(name)] for name in names], np.int8)[index]
    block["phase"] = np.repeat(phase, shape[1])
    if layout.weights is not None:
        block["weights"] = alike.floats(layout.weights).reshape(-1, shape[2])
    if layout.seq is not None:
        column = layout.seq if layout.seq >= 0 else ~layout.seq
        if layout.seq >= 0 and not alike.whole[:, column].all():
            return None
        block["text"] = np.repeat(alike.at + column, shape[1])
    return block


class _LineByLine:
    """Rows of any of the layouts; what is wrong is named."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, _Place()

    def rows(
        self, number: int, data: bytes, start: int, sequences: Appearance
    ) -> Block | None:
        """The rows of the lines in `data` from line `number`, row `start` on; None
        where there are none.
        """
        path = self.path
        found = list[_Row]()
        for line, text in enumerate(data.splitlines(), start=number):
            if text.strip():
                with decoding(path, f"line {line}"):
                    found += _of(path, line, json.loads(text), self.place)
        if not found:
            return None
        first = found[0]
        phases = np.array(
            [self._phase(start + index, row, first) for index, row in enumerate(found)],
            np.int8,
        )
        labels: dict[str, int] = {}
        index = np.array(
            [labels.setdefault(str(row.seq), len(labels)) for row in found]
        )
        with decoding(path, "rows"):
            block = {
                "seq": sequences.of_labels(list(labels), index),
                "pos": _whole(path, "pos", [row.pos for row in found]),
                "layer": _whole(path, "layer", [row.layer for row in found]),
                "experts": _whole(
                    path, "experts", [row.experts for row in found], 1 << 16
                ).astype(np.uint16),
                "phase": phases,
            }
            if first.weights is not None:
                block["weights"] = np.array([row.weights for row in found], np.float32)
                if block["weights"].shape != block["experts"].shape:
                    shapes = [
                        list(block[name].shape) for name in ("experts", "weights")
                    ]
                    raise bad(
                        path, "weights", f"one per expert: {shapes[0]}", shapes[1]
                    )
        return block

    def _phase(self, number: int, row: _Row, first: _Row) -> Phase:
        """The phase of a row that is made like `first`."""
        path = self.path
        where = f"row {number}"
        if not isinstance(row.experts, list):
            raise bad(path, f"{where}: experts", "a list of ids", row.experts)
        if len(row.experts) != len(first.experts) or not row.experts:
            raise bad(
                path,
                f"{where}: experts",
                len(first.experts) or "at least 1",
                len(row.experts),
            )
        if (row.weights is None) != (first.weights is None):
            raise bad(
                path, f"{where}: weights", "weights in all rows or in none", "a mixture"
            )
        code = Phase.DECODE if row.phase is None else _PHASES.get(str(row.phase))
        if code is None:
            raise bad(path, f"{where}: phase", "prefill or decode", row.phase)
        return code


def _whole(
    path: Path, name: str, values: list[Any], limit: int = 1 << 31
) -> np.ndarray:
    array = np.array(values)
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= limit:
        found = (
            f"{array.min()}..{array.max()}"
            if array.dtype.kind in "iu"
            else f"{array.dtype}"
        )
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
    """Where a list of ``[layer, ids]`` stands: a layer that is not higher than the last
    one begins a token.
    """

    def __init__(self) -> None:
        self.token = -1
        self.layer = -1
        self.top_k = 0

    def row(self, path: Path, number: int, value: list[Any]) -> _Row:
        """One row of a list."""
        layer, *experts = value
        if self.top_k and len(experts) != self.top_k:
            raise bad(
                path,
                f"line {number}",
                f"[layer, {self.top_k} ids] as in the header",
                f"{len(experts)} ids",
            )
        if self.token < 0 or layer <= self.layer:
            self.token += 1
        self.layer = layer
        return _Row(0, self.token, None, layer, experts, None)

    def rows(self, block: Block) -> bool:
        """Give rows of lists their pos; False where they are not as the header says."""
        layer = block["layer"]
        if block["experts"].shape[1] != (self.top_k or block["experts"].shape[1]):
            return False
        begins = np.concatenate(
            ([self.token < 0 or layer[0] <= self.layer], np.diff(layer) <= 0)
        )
        block["pos"] = (self.token + np.cumsum(begins)).astype(np.int32)
        self.token = int(block["pos"][-1])
        self.layer = int(layer[-1])
        return True


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
        raise bad(
            path,
            f"line {number}",
            "a position (pos, token, token_idx)",
            ", ".join(value),
        )
    common = (
        value[names["seq"]] if names["seq"] else 0,
        value[names["pos"]],
        value.get("phase"),
    )
    if "layers" not in value:
        if names["layer"] is None or names["experts"] is None:
            raise bad(
                path, f"line {number}", "a layer and its experts", ", ".join(value)
            )
        weights = value[names["weights"]] if names["weights"] else None
        yield _Row(*common, value[names["layer"]], value[names["experts"]], weights)
        return
    for index, one in enumerate(value["layers"]):
        if not isinstance(one, dict):
            yield _Row(*common, index, one, None)
            continue
        keys = {name: _key(one, name) for name in _NAMES}
        layer = one[keys["layer"]] if keys["layer"] else index
        yield _Row(
            *common,
            layer,
            one[keys["experts"] or "experts"],
            one.get(keys["weights"] or "weights"),
        )

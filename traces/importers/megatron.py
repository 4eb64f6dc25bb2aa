"""Megatron-Core router trace: JSONL of step, stage, block, layer, rank, num_tokens,
topk and top_indices, by rank.

The tokens of a record belong to nobody by name: a step of several tokens is taken as a
prompt of its own, steps of one token continue it. Records of draft heads (block
``mtp``) and the binary files beside the trace are left out.

Source: megatron/core/transformer/moe/router_trace.py.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from moesim.traces.format.sorting import Unordered
from moesim.traces.importers.readers.foreign import (
    DAMAGE,
    NO_WEIGHTS,
    Passes,
    bad,
    decoding,
    finished,
    first_object,
    head,
    line_chunks,
)
from moesim.traces.importers.readers.number_scanner import Ref, Scanner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.importers.readers.number_scanner import Lines

    Block = dict[str, np.ndarray]
    # Step, layer, tokens of each; all ids [N, K].
    Records = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

_KEYS = frozenset({"step", "layer", "rank", "num_tokens", "topk"})
_START = b'{"step":'
_DRAFT = re.compile(rb'"block"\s*:\s*"mtp"')


def recognises(path: Path) -> bool:
    """Whether the first line is a record, or begins like one (a record of many tokens
    is one long line).
    """
    first = first_object(path)
    if isinstance(first, dict):
        return set(first) >= _KEYS
    start = head(path, 512).lstrip()
    return start.startswith(_START) and all(
        f'"{key}"'.encode() in start for key in _KEYS
    )


def provenance(path: Path) -> dict[str, Any]:
    """Rank, and remarks."""
    notes = [
        NO_WEIGHTS,
        "steps of several tokens are taken as prompts: requests have no names",
    ]
    rank = None
    drafts = 0
    sidecars = False
    for number, data in line_chunks(path):
        if rank is None and data.strip():
            rank = next(_records(path, number, data.lstrip().split(b"\n", 1)[0]))[1][
                "rank"
            ]
        drafts += len(_DRAFT.findall(data)) if b'"mtp"' in data else 0
        if b"f" in data:  # rare, and much faster to look for
            sidecars |= b'"hs_offset"' in data or b'"logit_offset"' in data
    if not isinstance(rank, int):
        raise bad(path, "rank", "a whole number", rank)
    if drafts:
        notes.append(f"{drafts} records of draft heads (block mtp) left out")
    if sidecars:
        notes.append(
            "hidden states and logits in the files beside the trace are left out"
        )
    return {"rank": rank, "notes": notes}


def read(path: Path, shape: ModelShape) -> Unordered:
    """The file's steps."""
    return Unordered(lambda: _pieces(path), lambda block: finished(path, shape, block))


def _pieces(path: Path) -> Iterator[Block]:
    """Rows of some whole steps at a time."""
    passes = Passes(chunked=False)
    fast = _Alike()
    held: Records | None = None
    top_k = 0
    for number, data in line_chunks(path):
        found = fast.records(data) or _line_by_line(path, number, data)
        if found is None:
            continue
        top_k = top_k or found[3].shape[1]
        if found[3].shape[1] != top_k:
            raise bad(
                path,
                f"line {number}: topk",
                str(top_k),
                found[3].shape[1],
                "one trace has one top-k",
            )
        step, layer, tokens, experts = found
        if held is not None:
            step, layer, tokens, experts = (
                np.concatenate(parts) for parts in zip(held, found, strict=True)
            )
        # The last step may go on in what is not read yet.
        begins = np.flatnonzero(np.diff(step)) + 1
        whole = int(begins[-1]) if len(begins) else 0
        rows = int(tokens[:whole].sum())
        if whole:
            yield _rows(
                passes, (step[:whole], layer[:whole], tokens[:whole], experts[:rows])
            )
        held = (step[whole:], layer[whole:], tokens[whole:], experts[rows:])
    if held is None:
        raise bad(
            path,
            "records",
            "at least one of the decoder",
            "none",
            "hooks do not fire under CUDA graphs",
        )
    yield _rows(passes, held)


def _rows(passes: Passes, records: Records) -> Block:
    """A training step runs several micro-batches: the second record of a layer in a
    step belongs to the next one.
    """
    step, layer, tokens, experts = records
    step = np.cumsum(np.concatenate(([0], np.diff(step) != 0)))
    layers = int(layer.max()) + 1
    order = np.argsort(step * layers + layer, kind="stable")
    fresh = np.concatenate(([True], np.diff((step * layers + layer)[order]) != 0))
    turn = np.empty_like(order)
    turn[order] = np.arange(len(order)) - np.flatnonzero(fresh)[np.cumsum(fresh) - 1]
    sorted_ = np.argsort((step * len(step) + turn) * layers + layer, kind="stable")
    starts = np.cumsum(tokens) - tokens
    number = np.cumsum(
        np.concatenate(
            ([0], (np.diff(step[sorted_]) != 0) | (np.diff(turn[sorted_]) != 0))
        )
    )
    sizes = tokens[sorted_]
    rows = np.repeat(starts[sorted_] - (np.cumsum(sizes) - sizes), sizes) + np.arange(
        len(experts)
    )
    return passes.rows(number, layer[sorted_], sizes, np.take(experts, rows, axis=0))


class _Layout(NamedTuple):
    """Where lines of one form keep their record: the number of each value; `experts`
    [T, K].
    """

    step: int
    layer: int
    tokens: int
    top_k: int
    block: int | None
    experts: np.ndarray

    @classmethod
    def of(cls, record: Any) -> _Layout | None:
        """The layout of a record whose values are `Ref`; None for one that is not read
        this way.
        """
        if not isinstance(record, dict) or not set(record) >= _KEYS:
            return None
        rows = record.get("top_indices")
        block = record.get("block")
        if (
            not isinstance(rows, list)
            or not rows
            or not all(isinstance(row, list) and row for row in rows)
        ):
            return None
        facts = step, layer, tokens, top_k = [
            record[name] for name in ("step", "layer", "num_tokens", "topk")
        ]
        if not Ref.are_numbers(
            [*facts, record["rank"], *chain.from_iterable(rows)]
        ) or not (block is None or (type(block) is Ref and block < 0)):
            return None
        if len({len(row) for row in rows}) > 1:
            return None
        return cls(step, layer, tokens, top_k, block, np.array(rows))


class _Alike:
    """Records of lines whose form was met before, at once."""

    def __init__(self) -> None:
        self._scanner = Scanner()
        self._known: dict[int, _Layout | None] = {}

    def records(self, data: bytes) -> Records | None:
        """The decoder's records in some lines; None where one is odd, or there is
        none.
        """
        lines = self._scanner.scan(data)
        if lines is None:
            return None
        found: list[
            tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
        ] = []
        for alike in lines.forms():
            layout = self._layout(lines, int(alike.lines[0]))
            if layout is None:
                return None
            if layout.block is not None:
                names, index = lines.labels(alike.at + ~layout.block)
                kept = alike.some(np.array([name != "mtp" for name in names])[index])
            else:
                kept = alike
            if not len(kept.lines):
                continue
            tokens, width = layout.experts.shape
            facts = kept.integers(
                [layout.step, layout.layer, layout.tokens, layout.top_k]
            )
            ids = kept.integers(layout.experts, np.uint16)
            if (
                facts is None
                or ids is None
                or facts[:, 1].max() >= 1 << 16
                or (facts[:, 2:] != (tokens, width)).any()
            ):
                return None
            found.append(
                (kept.lines, *facts[:, :3].astype(np.int64).T, ids.reshape(-1, width))
            )
        if not found or len({one[4].shape[1] for one in found}) > 1:
            return None
        line, step, layer, tokens_, experts = (
            np.concatenate(parts) for parts in zip(*found, strict=True)
        )
        if len(found) > 1:
            order = np.argsort(line, kind="stable")
            experts = np.take(
                experts, np.argsort(np.repeat(line, tokens_), kind="stable"), axis=0
            )
            step = step[order]
            layer = layer[order]
            tokens_ = tokens_[order]
        return step, layer, tokens_, experts

    def _layout(self, lines: Lines, line: int) -> _Layout | None:
        """What a line's form means, found out at the first of its kind."""
        form = int(lines.found.form[line])
        if form not in self._known:
            try:
                self._known[form] = _Layout.of(lines.meaning(line))
            except DAMAGE:
                self._known[form] = None
        return self._known[form]


def _line_by_line(path: Path, number: int, data: bytes) -> Records | None:
    """The same for lines with an odd record, which is named; None without a record of
    the decoder.
    """
    steps: list[int] = []
    layers: list[int] = []
    tables: list[np.ndarray] = []
    for line, record in _records(path, number, data):
        if record.get("block", "decoder") == "mtp":
            continue
        where = f"line {line}"
        with decoding(path, where):
            ids = np.array(record.get("top_indices"))
            steps.append(int(record["step"]))
            layers.append(int(record["layer"]))
            expected = (int(record["num_tokens"]), int(record["topk"]))
        if ids.shape != expected or ids.dtype.kind not in "iu" or not ids.size:
            raise bad(
                path,
                f"{where}: top_indices",
                f"{list(expected)} integers",
                f"{ids.dtype} {list(ids.shape)}",
            )
        if tables and ids.shape[1] != tables[0].shape[1]:
            raise bad(
                path,
                f"{where}: topk",
                str(tables[0].shape[1]),
                ids.shape[1],
                "one trace has one top-k",
            )
        if min(steps[-1], layers[-1]) < 0 or layers[-1] >= 1 << 16:
            raise bad(
                path,
                where,
                "a step and a layer from 0",
                f"step {steps[-1]}, layer {layers[-1]}",
            )
        if not 0 <= ids.min() <= ids.max() < 1 << 16:
            raise bad(
                path, f"{where}: top_indices", "expert ids", f"{ids.min()}..{ids.max()}"
            )
        tables.append(ids.astype(np.int32))
    if not tables:
        return None
    tokens = np.array([len(table) for table in tables])
    with decoding(path, "steps"):
        return (
            np.array(steps, np.int64),
            np.array(layers, np.int64),
            tokens,
            np.concatenate(tables),
        )


def _records(
    path: Path, number: int, data: bytes
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line and record, the first line being `number`."""
    for line, text in enumerate(data.splitlines(), start=number):
        if not text.strip():
            continue
        with decoding(path, f"line {line}"):
            record = json.loads(text)
        if not isinstance(record, dict) or not set(record) >= _KEYS:
            found = (
                ", ".join(record) if isinstance(record, dict) else type(record).__name__
            )
            raise bad(
                path,
                f"line {line}",
                f"an object with {', '.join(sorted(_KEYS))}",
                found,
            )
        yield line, record

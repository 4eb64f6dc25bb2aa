"""CSV of llama.cpp's moe-trace: rows ``layer,expert``, one per routed activation; or
``layer_id,expert_ids``, one per token, its ids apart by blanks.

The file does not tell tokens, and of single activations no top-k: consecutive rows of
one layer are its tokens of one pass, K rows each with K from the model's shape, or one
row each. Several tokens in a pass are prompt, one token is generated; a prompt behind
generated tokens begins a sequence, and so does another header (people join such files).

Source: llama.cpp pull request 28544, examples/moe-trace.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.arrays import first_repeat
from moesim.traces.format.rows import blocks
from moesim.traces.importers.readers.foreign import (
    NAMES,
    NO_WEIGHTS,
    Foreign,
    first_lines,
    head,
    layout_error,
    one_of,
)
from moesim.traces.importers.readers.sequence_rows import (
    ForwardPasses,
    UnclearError,
    ended,
)
from moesim.traces.importers.readers.tables import csv_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

OPTIONS = {
    "prompt_passes": (
        "joined or apart: whether consecutive passes of several tokens are one prompt,"
        " where every layer has all their tokens"
    ),
}
_COLUMNS = (["layer", "expert"], ["layer", "experts"])
_ROW = re.compile(rb"-?\d+,-?\d+")
_STRIDED_COPY = (
    "a naive read of the ffn_moe_topk view gives such rows: copy the view row by row"
)


def recognises(path: Path) -> bool:
    """Whether the first lines are two integers each, or the header names a layer and
    experts alone.
    """
    return bool(_columns(path)) or all(map(_ROW.fullmatch, first_lines(path)))


def _header(path: Path) -> list[str]:
    line = head(path, 4096).split(b"\n")[0].decode("utf-8", "replace")
    return [word.strip() for word in line.split(",")]


def _columns(path: Path) -> list[str]:
    """Our names of the two columns in the header's order: a layer, and an expert or a
    list; nothing where it has others.
    """
    ours = {name: column for column in ("layer", "experts") for name in NAMES[column]}
    columns = [{**ours, "expert": "expert"}.get(name) for name in _header(path)]
    # A table with more columns tells tokens, and another importer reads it.
    is_known = columns in _COLUMNS or columns[::-1] in _COLUMNS
    return [str(name) for name in columns] if is_known else []


def read(path: Path, shape: ModelShape, **given: str) -> Foreign:
    """The file's passes."""
    word = one_of(path, given, "prompt_passes", ("joined", "apart"))
    joins = word == "joined" if word else None
    columns = _columns(path)
    of_lists = "experts" in columns
    note = "no combine weights, tokens or top-k in the source: the shape's top-k and"
    return Foreign(
        lambda: _passes(path, shape, columns, joins),
        notes=["no tokens in the source: pass sizes decide"] * of_lists,
        no_weights=NO_WEIGHTS if of_lists else f"{note} pass sizes decide",
    )


def _passes(
    path: Path, shape: ModelShape, columns: list[str], joins: bool | None
) -> Iterator[Block]:
    """The rows of some whole passes at a time; a pass ends where the layer falls, or
    with its file.

    Args:
        path: the file.
        shape: the model; its top-k says how many activations a token has.
        columns: of the header; none without one.
        joins: as in `ForwardPasses`.
    """
    passes = ForwardPasses(layers=shape.layers, joins=joins)
    names = columns or ["layer", "expert"]
    name = "experts" if "experts" in names else "expert"
    widths = _Widths(path, 1 if name == "experts" else shape.top_k, shape.experts)
    header = ",".join(_header(path) if columns else names)
    mapping = {each: [each] for each in names}
    rows = blocks(csv_rows(path, names, mapping, header=header))
    first_row = 0
    for _, of_file in groupby(rows, lambda block: block["seq"][0]):
        passes.restart()
        for passed in ended(of_file, _last_pass):
            yield _rows(path, first_row, passed, name, widths, passes)
            first_row += len(passed["seq"])
    if name == "expert":
        widths.check()


def _last_pass(rows: Block) -> int:
    falls = np.flatnonzero(np.diff(rows["layer"]) < 0)
    return int(falls[-1]) + 1 if len(falls) else 0


class _Widths:
    """Whether the file's tokens have as many rows as the shape says.

    Nothing marks the end of a token. But if every run of a layer is a multiple of G
    rows, each G of them distinct, then tokens have G experts.

    Args:
        path: the file, for errors.
        top_k: rows of a token.
        most: experts of a layer.
    """

    def __init__(self, path: Path, top_k: int, most: int) -> None:
        self.top_k = top_k
        self._path = path
        self._most = most
        self._common = 0
        self._is_distinct = True

    def add(self, choices: np.ndarray, expert: np.ndarray) -> None:
        """Take in the rows of each run, int [R], and the ids of all of them."""
        common = int(np.gcd.reduce(choices, initial=self._common))
        if common != self._common:
            self._common = common
            self._is_distinct = True
        if self.top_k < common <= self._most and self._is_distinct:
            groups = np.ascontiguousarray(expert.reshape(-1, common), np.uint16)
            self._is_distinct = first_repeat(groups) < 0

    def check(self) -> None:
        """Refuse another top-k than the shape's."""
        if self.top_k < self._common <= self._most and self._is_distinct:
            raise layout_error(
                self._path,
                "rows",
                f"tokens of {self.top_k} experts",
                f"{self._common} different ones or a multiple at every layer",
                "is the shape's top-k right?",
            )


def _rows(
    path: Path,
    first_row: int,
    rows: Block,
    name: str,
    widths: _Widths,
    passes: ForwardPasses,
) -> Block:
    """The rows of whole passes; the first one is row `first_row` of the file."""
    layer = rows["layer"]
    expert = rows[name]
    # A run: consecutive rows of one layer.
    starts = np.flatnonzero(np.concatenate(([True], np.diff(layer) != 0)))
    choices = np.diff(np.append(starts, len(layer)))
    top_k = widths.top_k
    tokens, rest = np.divmod(choices, top_k)
    experts = expert
    if expert.ndim == 1:
        widths.add(choices, expert)
        if rest.any():
            run = int(rest.argmax())
            raise layout_error(
                path,
                f"row {first_row + starts[run]}, layer {layer[starts[run]]}",
                f"whole tokens of {top_k} experts",
                f"{choices[run]} rows",
                "is the shape's top-k right?",
            )
        experts = expert.reshape(-1, top_k)

    row = first_repeat(np.ascontiguousarray(experts, np.uint16))
    if row >= 0:
        raise layout_error(
            path,
            f"row {first_row + row * top_k}",
            "distinct experts of a token",
            experts[row].tolist(),
            _STRIDED_COPY,
        )
    # A run whose layer is not above the one before begins a pass.
    number = np.cumsum(np.concatenate(([0], np.diff(layer[starts]) <= 0)))
    try:
        return passes.rows(number, layer[starts], tokens, experts)
    except UnclearError:
        # Another top-k makes every generated token look like a prompt.
        if expert.ndim == 1:
            widths.check()
        raise layout_error(
            path,
            f"passes from row {first_row}",
            "prompts that can be told apart",
            "consecutive passes with every token at every layer",
            "say --option prompt_passes=joined where they are pieces of one prompt, or"
            " =apart",
        ) from None

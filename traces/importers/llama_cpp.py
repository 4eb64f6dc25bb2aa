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
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.arrays import first_repeat
from moesim.traces.format.sorting import Unordered
from moesim.traces.importers import columns
from moesim.traces.importers.readers.foreign import (
    NAMES,
    NO_WEIGHTS,
    layout_error,
    layout_names,
)
from moesim.traces.importers.readers.sequence_rows import (
    ForwardPasses,
    UnclearError,
    finished,
)
from moesim.traces.importers.readers.text import csv_columns, head, sections

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

ASKED = ("map",)
OPTIONS = {
    "map": "layer=theirs,expert=theirs, as the file's first line calls them",
    "prompt_passes": (
        "joined or apart: whether consecutive passes of several tokens are one prompt,"
        " where every layer has all their tokens"
    ),
}
_HEADER = b"layer,expert"
_TYPES = {"layer": "int32", "expert": "int32"}
# What may stand on the left of a mapping; `experts` is our name.
_MAPPED = {"layer": "layer", "expert": "expert", "experts": "expert"}
_ROW = re.compile(rb"-?\d+,-?\d+")
# So many lines of bare numbers are enough to tell this layout from others.
_RECOGNISED_LINES = 50
_STRIDED_COPY = (
    "a naive read of the ffn_moe_topk view gives such rows: copy the view row by row"
)


def recognises(path: Path, **given: str) -> bool:
    """Whether the first lines are two integers each, with or without the header
    ``layer,expert``; or, of mapped columns, whether the header has these two alone.
    """
    if given:
        return _mapped_columns(path, given) is not None

    lines = head(path, 4096).replace(b"\r", b"").split(b"\n")
    if lines[0].strip() == _HEADER or _list_columns(path):
        return True

    # The last line of what was read may be cut.
    whole_lines = lines[:-1] or lines
    return all(_ROW.fullmatch(line) for line in whole_lines[:_RECOGNISED_LINES])


def _header(path: Path) -> list[str]:
    line = head(path, 4096).split(b"\n")[0].decode("utf-8", "replace")
    return [word.strip() for word in line.split(",")]


def _list_columns(path: Path) -> dict[str, list[str]]:
    """Our column -> the file's, of a table of layers and lists of ids alone."""
    header = _header(path)
    columns_of = {
        ours: [name for name in header if name in NAMES[ours]]
        for ours in ("layer", "experts")
    }
    is_list = len(header) == 2 and all(len(names) == 1 for names in columns_of.values())
    return columns_of if is_list else {}


def _mapped_columns(path: Path, given: dict[str, str]) -> list[str] | None:
    """Our names of the columns in the header's order; None where it has others."""
    names = layout_names(path, given, _MAPPED)
    ours = {theirs: name for name, theirs in names.items()}
    header = _header(path)
    # A table with more columns tells tokens, and another importer reads it.
    if sorted(header) != sorted(ours):
        return None
    return [ours[column] for column in header]


def provenance(path: Path, **given: str) -> dict[str, Any]:
    """Nothing but remarks: the file says nothing about itself."""
    if not given.get("map") and _list_columns(path):
        return {"notes": [NO_WEIGHTS, "no tokens in the source: pass sizes decide"]}
    return {
        "notes": [
            (
                "no combine weights, tokens or top-k in the source: the shape's top-k"
                " and pass sizes decide"
            )
        ]
    }


def read(path: Path, shape: ModelShape, **given: str) -> Unordered:
    """The file's passes."""
    joins = {"": None, "joined": True, "apart": False}
    prompt_passes = given.get("prompt_passes", "")
    if prompt_passes not in joins:
        raise layout_error(
            path, "--option prompt_passes", "joined or apart", repr(prompt_passes), ""
        )
    names = _mapped_columns(path, given) if "map" in given else None
    return Unordered(
        lambda: _pieces(path, shape, names, joins[prompt_passes]),
        lambda block: finished(path, shape, block),
    )


def _pieces(
    path: Path, shape: ModelShape, names: list[str] | None, joins: bool | None
) -> Iterator[Block]:
    """Rows of some passes at a time, file by file of those that were joined.

    Args:
        path: the file.
        shape: the model; its top-k says how many activations a token has.
        names: the columns in their order, where they were mapped.
        joins: as in `ForwardPasses`.
    """
    passes = ForwardPasses(layers=shape.layers, joins=joins)
    lists = {} if names else _list_columns(path)
    if lists:
        widths = _Widths(path, shape, of_lists=True)
        yield from _of_rows(path, columns.pieces(path, lists), widths, passes)
        return

    widths = _Widths(path, shape)
    header = ",".join(_header(path)).encode() if names else _HEADER
    parts = sections(path, header)
    if not parts:
        raise layout_error(path, "rows", "layer,expert", "nothing")
    for part in parts:
        rows = (
            {"layer": block["layer"], "experts": block["expert"].reshape(-1, 1)}
            for _, block in csv_columns(path, names or list(_TYPES), _TYPES, 0, part)
        )
        passes.restart()
        yield from _of_rows(path, rows, widths, passes)
    widths.check()


def _of_rows(
    path: Path, blocks: Iterable[Block], widths: _Widths, passes: ForwardPasses
) -> Iterator[Block]:
    """The rows of some whole passes at a time; a pass ends where the layer falls."""
    layer = np.empty(0, np.int32)
    experts = np.empty((0, 1), np.int32)
    first_row = 0
    for block in blocks:
        same_width = block["experts"].shape[1] == experts.shape[1]
        layer = np.concatenate((layer, block["layer"]))
        experts = (
            np.concatenate((experts, block["experts"]))
            if same_width
            else block["experts"]
        )
        falls = np.flatnonzero(np.diff(layer) < 0)
        if len(falls):  # the last pass may go on in what is not read yet
            end = int(falls[-1]) + 1
            yield _rows(path, first_row, layer[:end], experts[:end], widths, passes)
            layer = layer[end:]
            experts = experts[end:]
            first_row += end
    if len(layer):
        yield _rows(path, first_row, layer, experts, widths, passes)


class _Widths:
    """Whether the file's tokens have as many activations as the shape says.

    Nothing marks the end of a token. But if every run of a layer is a multiple of G
    rows, each G of them distinct, then tokens have G experts.
    """

    def __init__(
        self, path: Path, shape: ModelShape, *, of_lists: bool = False
    ) -> None:
        self._path = path
        self._most = shape.experts
        # A list is a token, however long it is.
        self.top_k = 1 if of_lists else shape.top_k
        self.of_lists = of_lists
        self._common = 0
        self._is_distinct = True

    def add(self, choices: np.ndarray, expert: np.ndarray) -> None:
        """Take in the rows of each run, int [R], and the ids of all of them."""
        common = int(np.gcd.reduce(choices, initial=self._common))
        if common != self._common:
            self._common = common
            self._is_distinct = True
        if self.top_k < common <= self._most and self._is_distinct:
            groups = np.sort(expert.reshape(-1, common), axis=1)
            self._is_distinct = bool((np.diff(groups, axis=1) != 0).all())

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
    layer: np.ndarray,
    expert: np.ndarray,
    widths: _Widths,
    passes: ForwardPasses,
) -> Block:
    """The rows of whole passes; the first activation is row `first_row` of the file."""
    # A run: consecutive activations of one layer.
    starts = np.flatnonzero(np.concatenate(([True], np.diff(layer) != 0)))
    choices = np.diff(np.append(starts, len(layer)))
    top_k = widths.top_k
    tokens, rest = np.divmod(choices, top_k)
    if not widths.of_lists:
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

    experts = expert if widths.of_lists else expert.reshape(-1, top_k)
    row = first_repeat(experts.astype(np.uint16))
    if row >= 0:
        raise layout_error(
            path,
            f"row {first_row + row * top_k}",
            "distinct experts of a token",
            experts[row].tolist(),
            _STRIDED_COPY,
        )

    # A run whose layer is not above the one before begins a pass.
    new_pass = np.diff(layer[starts]) <= 0
    number = np.cumsum(np.concatenate(([0], new_pass)))
    try:
        return passes.rows(number, layer[starts], tokens, experts)
    except UnclearError:
        # Another top-k makes every generated token look like a prompt.
        widths.check()
        raise layout_error(
            path,
            f"passes from row {first_row}",
            "prompts that can be told apart",
            "consecutive passes with every token at every layer",
            "say --option prompt_passes=joined where they are pieces of one prompt, or"
            " =apart",
        ) from None

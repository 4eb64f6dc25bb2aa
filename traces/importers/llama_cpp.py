"""CSV of llama.cpp's moe-trace: bare rows ``layer,expert``, one per routed activation.

The file tells neither tokens nor top-k: consecutive rows of one layer are its tokens of
one pass, K rows each, with K from the model's shape. Several tokens in a pass are
prompt, one token is generated; a prompt behind generated tokens begins a sequence
(people join such files).

Source: llama.cpp pull request 28544, examples/moe-trace.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.arrays import first_repeat
from moesim.traces.format.sorting import Unordered
from moesim.traces.importers.readers.foreign import layout_error, layout_names
from moesim.traces.importers.readers.sequence_rows import (
    ForwardPasses,
    UnclearError,
    finished,
)
from moesim.traces.importers.readers.text import csv_columns, head

if TYPE_CHECKING:
    from collections.abc import Iterator
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
    if lines and lines[0].strip() == _HEADER:
        return True

    # The last line of what was read may be cut.
    whole_lines = lines[:-1] or lines
    return bool(lines) and all(
        _ROW.fullmatch(line) for line in whole_lines[:_RECOGNISED_LINES]
    )


def _mapped_columns(path: Path, given: dict[str, str]) -> list[str] | None:
    """Our names of the columns in the header's order; None where it has others."""
    names = layout_names(path, given, _MAPPED)
    ours = {theirs: name for name, theirs in names.items()}
    header = head(path, 4096).split(b"\n")[0].decode("utf-8", "replace")
    columns = [word.strip() for word in header.split(",")]
    # A table with more columns tells tokens, and another importer reads it.
    if sorted(columns) != sorted(ours):
        return None
    return [ours[column] for column in columns]


def provenance(path: Path, **given: str) -> dict[str, Any]:
    """Nothing but remarks: the file says nothing about itself."""
    del path, given
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
    columns = None
    if "map" in given:
        columns = _mapped_columns(path, given)
    skip = int(bool(columns) or head(path, 64).startswith(_HEADER))
    return Unordered(
        lambda: _pieces(
            path, shape, columns or list(_TYPES), skip, joins[prompt_passes]
        ),
        lambda block: finished(path, shape, block),
    )


def _pieces(
    path: Path, shape: ModelShape, names: list[str], skip: int, joins: bool | None
) -> Iterator[Block]:
    """Rows of some passes at a time; a pass ends where the layer falls.

    Args:
        path: the file.
        shape: the model; its top-k says how many activations a token has.
        names: the columns, in their order.
        skip: lines before the first row.
        joins: as in `ForwardPasses`.
    """
    passes = ForwardPasses(layers=shape.layers, joins=joins)
    widths = _Widths(path, shape)
    layer = np.empty(0, np.int32)
    expert = np.empty(0, np.int32)
    first_row = 0

    for _, columns in csv_columns(path, names, _TYPES, skip):
        layer = np.concatenate((layer, columns["layer"]))
        expert = np.concatenate((expert, columns["expert"]))

        falls = np.flatnonzero(np.diff(layer) < 0)
        if len(falls):  # the last pass may go on in what is not read yet
            end = int(falls[-1]) + 1
            yield _rows(path, first_row, layer[:end], expert[:end], widths, passes)
            layer = layer[end:]
            expert = expert[end:]
            first_row += end

    if first_row + len(layer) == 0:
        raise layout_error(path, "rows", "layer,expert", "nothing")
    if len(layer):
        yield _rows(path, first_row, layer, expert, widths, passes)
    widths.check()


class _Widths:
    """Whether the file's tokens have as many activations as the shape says.

    Nothing marks the end of a token. But if every run of a layer is a multiple of G
    rows, each G of them distinct, then tokens have G experts.
    """

    def __init__(self, path: Path, shape: ModelShape) -> None:
        self._path = path
        self._most = shape.experts
        self.top_k = shape.top_k
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

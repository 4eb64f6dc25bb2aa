"""CSV of llama.cpp's moe-trace: bare rows ``layer,expert``, one per routed activation.

The file tells neither tokens nor top-k: rows of one layer behind each other are its
tokens of one pass, K rows each, with K from the model's shape. Several tokens in a pass
are prompt, one token is generated; a prompt behind generated tokens begins a sequence
(people join such files).

Source: llama.cpp pull request 28544, examples/moe-trace.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
from moesim.traces.format.distinct import first_repeat
from moesim.traces.format.sorting import Unordered
from moesim.traces.importers.readers.foreign import (
    TEXT_BYTES,
    Passes,
    bad,
    finished,
    head,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

_HEADER = b"layer,expert"
_ROW = re.compile(rb"-?\d+,-?\d+")
_TRAP = (
    "a naive read of the ffn_moe_topk view gives such rows: copy the view row by row"
)


def recognises(path: Path) -> bool:
    """Whether the first lines are two integers each, with or without the header
    ``layer,expert``.
    """
    lines = head(path, 4096).replace(b"\r", b"").split(b"\n")
    if lines and lines[0].strip() == _HEADER:
        return True
    return bool(lines) and all(
        _ROW.fullmatch(line) for line in (lines[:-1] or lines)[:50]
    )


def provenance(path: Path) -> dict[str, Any]:
    """Nothing but remarks: the file says nothing about itself."""
    del path
    return {
        "notes": [
            (
                "no combine weights, tokens or top-k in the source: the shape's top-k"
                " and pass sizes decide"
            )
        ]
    }


def read(path: Path, shape: ModelShape) -> Unordered:
    """The file's passes."""
    return Unordered(
        lambda: _pieces(path, shape.top_k), lambda block: finished(path, shape, block)
    )


def _pieces(path: Path, top_k: int) -> Iterator[Block]:
    """Rows of some passes at a time; a pass ends where the layer falls."""
    passes = Passes(chunked=True)
    layer = np.empty(0, np.int32)
    expert = np.empty(0, np.int32)
    base = 0
    for more in _columns(path):
        layer = np.concatenate((layer, more[0]))
        expert = np.concatenate((expert, more[1]))
        falls = np.flatnonzero(np.diff(layer) < 0)
        if len(falls):  # the last pass may go on in what is not read yet
            whole = int(falls[-1]) + 1
            yield _rows(path, base, layer[:whole], expert[:whole], top_k, passes)
            layer = layer[whole:]
            expert = expert[whole:]
            base = base + whole
    if base + len(layer) == 0:
        raise bad(path, "rows", "layer,expert", "nothing")
    if len(layer):
        yield _rows(path, base, layer, expert, top_k, passes)


def _columns(path: Path) -> Iterator[list[np.ndarray]]:
    """Layers and experts, some rows at a time."""
    from pyarrow import csv  # noqa: PLC0415 - not every import is of text

    skip = head(path, 64).startswith(_HEADER)
    for batch in csv.open_csv(
        path,
        read_options=csv.ReadOptions(
            column_names=["layer", "expert"],
            skip_rows=int(skip),
            use_threads=False,
            block_size=TEXT_BYTES,
        ),
        convert_options=csv.ConvertOptions(
            column_types={"layer": "int32", "expert": "int32"}
        ),
    ):
        if any(column.null_count for column in batch.columns):
            raise bad(path, "rows", "layer,expert", "empty values")
        yield [np.asarray(column) for column in batch.columns]


def _rows(
    path: Path,
    base: int,
    layer: np.ndarray,
    expert: np.ndarray,
    top_k: int,
    passes: Passes,
) -> Block:
    """The rows of whole passes; the first activation is row `base` of the file."""
    starts = np.flatnonzero(np.concatenate(([True], np.diff(layer) != 0)))
    choices = np.diff(np.append(starts, len(layer)))
    tokens, rest = np.divmod(choices, top_k)
    if rest.any():
        run = int(rest.argmax())
        place = f"row {base + starts[run]}, layer {layer[starts[run]]}"
        raise bad(
            path,
            place,
            f"whole tokens of {top_k} experts",
            f"{choices[run]} rows",
            "is the shape's top-k right?",
        )
    number = np.cumsum(np.concatenate(([0], np.diff(layer[starts]) <= 0)))
    experts = expert.reshape(-1, top_k)
    if (row := first_repeat(experts.astype(np.uint16))) >= 0:
        raise bad(
            path,
            f"row {base + row * top_k}",
            "distinct experts of a token",
            experts[row].tolist(),
            _TRAP,
        )
    return passes.rows(number, layer[starts], tokens, experts)

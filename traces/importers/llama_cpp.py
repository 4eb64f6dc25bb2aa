"""CSV of llama.cpp's moe-trace: bare rows ``layer,expert``, one per routed activation.

The file tells neither tokens nor top-k: rows of one layer behind each other are its tokens of one pass, K rows each,
with K from the model's shape. Several tokens in a pass are prompt, one token is generated; a prompt behind
generated tokens begins a sequence (people join such files).

Source: llama.cpp pull request 28544, examples/moe-trace.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.foreign import bad, decoding, head, layer_numbers, sequences_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from traces.schema import ModelShape

    Block = dict[str, np.ndarray]

_HEADER = b"layer,expert"
_ROW = re.compile(rb"-?\d+,-?\d+")
_TRAP = "a naive read of the ffn_moe_topk view gives such rows: copy the view row by row"


def recognises(path: Path) -> bool:
    """Whether the first lines are two integers each, with or without the header ``layer,expert``."""
    lines = head(path, 4096).replace(b"\r", b"").split(b"\n")
    if lines and lines[0].strip() == _HEADER:
        return True
    return bool(lines) and all(_ROW.fullmatch(line) for line in (lines[:-1] or lines)[:50])


def provenance(path: Path) -> dict[str, Any]:
    """Nothing but remarks: the file says nothing about itself."""
    del path
    return {"notes": ["no combine weights, tokens or top-k in the source: the shape's top-k and pass sizes decide"]}


def read(path: Path, shape: ModelShape) -> Iterator[Block]:
    """Blocks of one sequence each; the whole file is parsed at once."""
    from pyarrow import csv  # noqa: PLC0415 - not every import is of text

    with decoding(path, "CSV"):
        skip = head(path, 64).startswith(_HEADER)
        table = csv.read_csv(
            path,
            read_options=csv.ReadOptions(column_names=["layer", "expert"], skip_rows=int(skip), use_threads=False),
            convert_options=csv.ConvertOptions(column_types={"layer": "int32", "expert": "int32"}),
        )
        layer, expert = (np.asarray(table.column(name).combine_chunks()) for name in ("layer", "expert"))
    if table.column("layer").null_count or table.column("expert").null_count or not len(layer):
        raise bad(path, "rows", "layer,expert", "empty values" if len(layer) else "nothing")
    starts = np.flatnonzero(np.concatenate(([True], np.diff(layer) != 0)))
    choices = np.diff(np.append(starts, len(layer)))
    tokens, rest = np.divmod(choices, shape.top_k)
    if rest.any():
        run = int(rest.argmax())
        place = f"row {starts[run]}, layer {layer[starts[run]]}"
        raise bad(
            path, place, f"whole tokens of {shape.top_k} experts", f"{choices[run]} rows", "is the shape's top-k right?"
        )
    number_of = layer_numbers(path, np.unique(layer).tolist(), shape)
    run_layer = np.array([number_of[one] for one in layer[starts].tolist()])
    number = np.cumsum(np.concatenate(([0], np.diff(run_layer) <= 0)))
    experts = expert.reshape(-1, shape.top_k)
    ranked = np.sort(experts, axis=1)
    if (twice := (ranked[:, 1:] == ranked[:, :-1]).any(axis=1)).any():
        row = int(twice.argmax())
        raise bad(path, f"row {row * shape.top_k}", "distinct experts of a token", experts[row].tolist(), _TRAP)
    yield from sequences_of(number, run_layer, tokens, experts, chunked=True)

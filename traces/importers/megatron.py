"""Megatron-Core router trace (JSONL, one file per rank): step, stage, block, layer, rank, num_tokens, topk, top_indices.

The tokens of a record belong to nobody by name: a step of several tokens is taken as a prompt of its own, steps of one
token continue it. Records of draft heads (block ``mtp``) and the binary files beside the trace are left out.

Source: megatron/core/transformer/moe/router_trace.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.foreign import bad, decoding, first_object, head, layer_numbers, sequences_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from traces.schema import ModelShape

    Block = dict[str, np.ndarray]

_KEYS = frozenset({"step", "layer", "rank", "num_tokens", "topk"})
_START = b'{"step":'


def recognises(path: Path) -> bool:
    """Whether the first line is a record, or begins like one (a record of many tokens is one long line)."""
    first = first_object(path)
    if isinstance(first, dict):
        return set(first) >= _KEYS
    start = head(path, 512).lstrip()
    return start.startswith(_START) and all(f'"{key}"'.encode() in start for key in _KEYS)


def provenance(path: Path) -> dict[str, Any]:
    """Rank, and remarks."""
    notes = ["no combine weights in the source", "steps of several tokens are taken as prompts: requests have no names"]
    drafts = sidecars = 0
    rank = 0
    for _, record in _records(path):
        drafts += record.get("block") == "mtp"
        sidecars += "hs_offset" in record or "logit_offset" in record
        rank = record["rank"]
    if not isinstance(rank, int):
        raise bad(path, "rank", "a whole number", rank)
    if drafts:
        notes.append(f"{drafts} records of draft heads (block mtp) left out")
    if sidecars:
        notes.append("hidden states and logits in the files beside the trace are left out")
    return {"rank": rank, "notes": notes}


def read(path: Path, shape: ModelShape) -> Iterator[Block]:
    """Blocks of one sequence each; needs the ids in memory."""
    runs: dict[tuple[int, int, int], np.ndarray] = {}
    width = 0
    again: dict[tuple[int, int], int] = {}
    for line, record in _records(path):
        if record.get("block", "decoder") == "mtp":
            continue
        where = f"line {line}"
        with decoding(path, where):
            ids = np.array(record.get("top_indices"))
            step, layer = int(record["step"]), int(record["layer"])
            expected = (int(record["num_tokens"]), int(record["topk"]))
        if ids.shape != expected or ids.dtype.kind not in "iu" or not ids.size:
            raise bad(path, f"{where}: top_indices", f"{list(expected)} integers", f"{ids.dtype} {list(ids.shape)}")
        width = width or ids.shape[1]
        if ids.shape[1] != width:
            raise bad(path, f"{where}: topk", width, ids.shape[1], "one trace has one top-k")
        turn = again.get((step, layer), 0)  # a training step runs several micro-batches
        again[step, layer] = turn + 1
        runs[step, turn, layer] = ids
    if not runs:
        raise bad(path, "records", "at least one of the decoder", "none", "hooks do not fire under CUDA graphs")
    keys = sorted(runs)
    number_of = layer_numbers(path, {layer for *_, layer in keys}, shape)
    passes = {key: number for number, key in enumerate(sorted({key[:2] for key in keys}))}
    ids = [runs[key] for key in keys]
    yield from sequences_of(
        np.array([passes[key[:2]] for key in keys]),
        np.array([number_of[layer] for *_, layer in keys]),
        np.array([len(one) for one in ids]),
        np.concatenate(ids),
        chunked=False,
    )


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            with decoding(path, f"line {number}"):
                record = json.loads(line)
            if not isinstance(record, dict) or not set(record) >= _KEYS:
                found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise bad(path, f"line {number}", f"an object with {', '.join(sorted(_KEYS))}", found)
            yield number, record

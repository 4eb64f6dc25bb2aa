"""Megatron-Core router trace: JSONL of step, stage, block, layer, rank, num_tokens, topk and top_indices, by rank.

The tokens of a record belong to nobody by name: a step of several tokens is taken as a prompt of its own, steps of one
token continue it. Records of draft heads (block ``mtp``) and the binary files beside the trace are left out.

Source: megatron/core/transformer/moe/router_trace.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from traces.arrow import flat, values
from traces.foreign import Once, bad, decoding, first_object, head, json_table, layer_numbers, list_rows, sequences_of

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
    rank, drafts, sidecars = _facts(path)
    if not isinstance(rank, int):
        raise bad(path, "rank", "a whole number", rank)
    if drafts:
        notes.append(f"{drafts} records of draft heads (block mtp) left out")
    if sidecars:
        notes.append("hidden states and logits in the files beside the trace are left out")
    return {"rank": rank, "notes": notes}


def read(path: Path, shape: ModelShape) -> Iterator[Block]:
    """Blocks of one sequence each; needs the ids in memory."""
    step, layer, tokens, experts = _at_once(path) or _line_by_line(path)
    # a training step runs several micro-batches: the second record of a layer in a step belongs to the next one
    key = step * (int(layer.max()) + 1) + layer
    order = np.argsort(key, kind="stable")
    first = np.searchsorted(key[order], key[order])
    turn = np.empty_like(order)
    turn[order] = np.arange(len(order)) - first
    passes = np.lexsort((layer, turn, step))
    starts = np.cumsum(tokens) - tokens
    number = np.cumsum(np.concatenate(([0], (np.diff(step[passes]) != 0) | (np.diff(turn[passes]) != 0))))
    number_of = layer_numbers(path, np.unique(layer).tolist(), shape)
    of_layer = np.array([number_of.get(one, -1) for one in range(int(layer.max()) + 1)])
    sizes = tokens[passes]
    rows = np.repeat(starts[passes] - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(experts))
    yield from sequences_of(number, of_layer[layer[passes]], sizes, experts[rows], chunked=False)


def _table(path: Path) -> pa.Table | None:
    numbers = [pa.field(name, pa.int64()) for name in (*sorted(_KEYS), "hs_offset", "logit_offset")]
    lists = pa.field("top_indices", pa.list_(pa.list_(pa.int32())))
    return json_table(path, pa.schema([*numbers, pa.field("block", pa.string()), lists]), [*_KEYS, "top_indices"])


_parsed = Once(_table)


def _facts(path: Path) -> tuple[Any, int, bool]:
    """Rank, records of draft heads, and whether tensors lie beside the trace."""
    table = _parsed.kept(path)
    if table is None:
        rank, drafts, sidecars = None, 0, False
        for _, record in _records(path):
            rank = record["rank"]
            drafts += record.get("block") == "mtp"
            sidecars |= "hs_offset" in record or "logit_offset" in record
        return rank, drafts, sidecars
    drafts = sum(block == "mtp" for block in table.column("block").to_pylist())
    sidecars = any(table.column(name).null_count < table.num_rows for name in ("hs_offset", "logit_offset"))
    return table.column("rank")[0].as_py(), drafts, sidecars


def _at_once(path: Path) -> tuple[np.ndarray, ...] | None:
    """Step, layer and tokens of every record of the decoder, and all ids [N, K]; None where a record is odd."""
    table = _parsed.taken(path)
    if table is None:
        return None
    keep = np.array([block != "mtp" for block in table.column("block").to_pylist()])
    step, layer, tokens, top_k = (
        np.asarray(table.column(name).chunk(0)) for name in ("step", "layer", "num_tokens", "topk")
    )
    outer = list_rows(table, "top_indices")
    inner = None if outer is None else flat(table.column("top_indices").chunk(0))
    if inner is None or outer is None or not keep.any() or min(step.min(), layer.min()) < 0 or layer.max() >= 1 << 16:
        return None
    lengths, ids = np.diff(values(inner.offsets)), flat(inner)
    width = int(top_k[0])
    if ids.null_count or (lengths != width).any() or width < 1 or (top_k != width).any() or (outer[0] != tokens).any():
        return None
    experts = np.asarray(ids).reshape(-1, width)[np.repeat(keep, tokens)]
    return (step[keep], layer[keep], tokens[keep], experts) if tokens[keep].min() > 0 else None


def _line_by_line(path: Path) -> tuple[np.ndarray, ...]:
    """The same for a file with an odd record, which is named."""
    steps: list[int] = []
    layers: list[int] = []
    tables: list[np.ndarray] = []
    for line, record in _records(path):
        if record.get("block", "decoder") == "mtp":
            continue
        where = f"line {line}"
        with decoding(path, where):
            ids = np.array(record.get("top_indices"))
            steps.append(int(record["step"]))
            layers.append(int(record["layer"]))
            expected = (int(record["num_tokens"]), int(record["topk"]))
        if ids.shape != expected or ids.dtype.kind not in "iu" or not ids.size:
            raise bad(path, f"{where}: top_indices", f"{list(expected)} integers", f"{ids.dtype} {list(ids.shape)}")
        if tables and ids.shape[1] != tables[0].shape[1]:
            raise bad(path, f"{where}: topk", str(tables[0].shape[1]), ids.shape[1], "one trace has one top-k")
        if min(steps[-1], layers[-1]) < 0 or layers[-1] >= 1 << 16:
            raise bad(path, where, "a step and a layer from 0", f"step {steps[-1]}, layer {layers[-1]}")
        tables.append(ids)
    if not tables:
        raise bad(path, "records", "at least one of the decoder", "none", "hooks do not fire under CUDA graphs")
    tokens = np.array([len(table) for table in tables])
    with decoding(path, "steps"):
        return np.array(steps, np.int64), np.array(layers, np.int64), tokens, np.concatenate(tables)


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

"""Megatron-Core router trace: JSONL of step, stage, block, layer, rank, num_tokens,
topk and top_indices, by rank.

The file does not say which request a token of a record belongs to: a step of several
tokens is taken as a prompt of its own, steps of one token continue it. Records of draft
heads (block ``mtp``) and the binary files beside the trace are left out.

Source: megatron/core/transformer/moe/router_trace.py.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.parquet import numbers, values
from moesim.traces.format.sorting import Unordered
from moesim.traces.importers.readers.foreign import (
    NO_WEIGHTS,
    Foreign,
    decoding,
    head,
    layout_error,
    layout_names,
)
from moesim.traces.importers.readers.json_lines import (
    columns_of,
    items_of,
    json_lines,
    lengths_of,
)
from moesim.traces.importers.readers.sequence_rows import ForwardPasses, finished
from moesim.traces.importers.readers.tables import blocks
from moesim.traces.importers.readers.text import (
    first_line,
    first_object,
    line_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.importers.readers.json_lines import Lines

    Block = dict[str, np.ndarray]

_KEYS = ("layer", "num_tokens", "rank", "step", "topk")
_STRUCTURE = {
    **dict.fromkeys(_KEYS, "DOUBLE"),
    "block": "VARCHAR",
    "top_indices": [["DOUBLE"]],
}
ASKED = ("map",)
OPTIONS = {"map": "a key of a record=theirs, joined by commas"}
# What may stand on the left of a mapping; `experts` is our name.
_MAPPED = {name: name for name in _STRUCTURE} | {"experts": "top_indices"}
_DRAFT = "mtp"


def recognises(path: Path, **given: str) -> bool:
    """Whether the first line is a record, or begins like one (a record of many tokens
    is one long line).
    """
    names = layout_names(path, given, _MAPPED)
    # A record may have more keys, as those with hidden states beside it do.
    keys = {names[key] for key in _KEYS}
    first = first_object(path)
    if isinstance(first, dict):
        return first.keys() >= keys

    start = head(path, 512).lstrip()
    has_keys = all(f'"{key}"'.encode() in start for key in keys)
    return start.startswith(f'{{"{names["step"]}":'.encode()) and has_keys


def read(path: Path, shape: ModelShape, **given: str) -> Foreign:
    """The file's steps."""
    names = layout_names(path, given, _MAPPED)
    first = first_line(path)
    rank = None
    if first is not None:
        with decoding(path, f"line {first[0]}"):
            rank = json.loads(first[1])[names["rank"]]
    if not isinstance(rank, int):
        raise layout_error(path, "rank", "a whole number", rank)

    drafts, has_files = _left_out(path, names["block"])
    notes = [
        NO_WEIGHTS,
        "steps of several tokens are taken as prompts: requests have no names",
    ]
    if drafts:
        notes.append(f"{drafts} records of draft heads (block mtp) left out")
    if has_files:
        notes.append(
            "hidden states and logits in the files beside the trace are left out"
        )
    rows = Unordered(
        lambda: _pieces(path, names), lambda block: finished(path, shape, block)
    )
    return Foreign(rows, notes=notes, facts={"rank": rank})


def _left_out(path: Path, block: str) -> tuple[int, bool]:
    """How many records are of draft heads, and whether files lie beside the trace."""
    draft = re.compile(rf'"{re.escape(block)}"\s*:\s*"{_DRAFT}"'.encode())
    drafts = 0
    has_files = False
    for data in line_chunks(path):
        # Looking for a word first is many times faster than the expression.
        if _DRAFT.encode() in data:
            drafts += len(draft.findall(data))
        has_files |= b'"hs_offset"' in data or b'"logit_offset"' in data
    return drafts, has_files


def _pieces(path: Path, names: dict[str, str]) -> Iterator[Block]:
    """Rows of some whole steps at a time; `names` has what the file calls keys."""
    passes = ForwardPasses()
    pending: Block = {}
    structure = {names[key]: kind for key, kind in _STRUCTURE.items()}
    for lines in json_lines(path, structure):
        records = _records(lines, names)
        if not len(records["step"]):
            continue
        if pending:
            # Behind the records of the step that was still open.
            records = {
                name: np.concatenate((pending[name], column))
                for name, column in records.items()
            }
        # The last step may go on in what is not read yet.
        step_starts = np.flatnonzero(np.diff(records["step"])) + 1
        end = int(step_starts[-1]) if len(step_starts) else 0
        if end:
            yield _rows(passes, _part(records, slice(None, end)))
        pending = _part(records, slice(end, None))

    if not pending:
        raise layout_error(
            path,
            "records",
            "at least one of the decoder",
            "none",
            "hooks do not fire under CUDA graphs",
        )
    yield _rows(passes, pending)


def _part(records: Block, part: slice) -> Block:
    """Some of the records, with their rows."""
    edges = np.concatenate(([0], np.cumsum(records["num_tokens"])))
    first, stop = edges[part.start or 0], edges[-1 if part.stop is None else part.stop]
    return {
        name: column[first:stop] if name == "experts" else column[part]
        for name, column in records.items()
    }


def _records(lines: Lines, names: dict[str, str]) -> Block:
    """The checked records of the decoder in some lines. R records, N tokens in all:
    numbers [R], and ids [N, K], one record after the other.
    """
    structs = lines.values
    # A record without a block is the decoder's.
    kinds = columns_of(structs)[names["block"]].dictionary_encode()
    is_draft = np.array(
        [name == _DRAFT for name in kinds.dictionary.to_pylist()] + [False]
    )
    kept = np.flatnonzero(~is_draft[values(kinds.indices.fill_null(-1))])
    if len(kept) < len(structs):
        structs = structs.take(numbers(kept))
    columns = columns_of(structs)

    def read(columns: dict[str, Any], record: np.ndarray) -> Block:
        (block,) = blocks([lines.rows(columns, kept[record])])
        return block

    every = np.arange(len(kept))
    block = read({key: columns[names[key]] for key in _KEYS}, every)
    ids = columns[names["top_indices"]]
    tokens = block["num_tokens"]
    wrong = (lengths_of(ids) != tokens) | (tokens == 0)
    record_of = np.repeat(every, lengths_of(ids))
    each = items_of(ids)
    wrong[record_of[lengths_of(each) != block["topk"][record_of]]] = True
    if wrong.any():
        record = int(wrong.argmax())
        expected = f"[{tokens[record]}, {block['topk'][record]}] integers"
        raise lines.fault(int(kept[record]), "top_indices", expected)
    if len(kept):
        block |= read({"experts": each}, record_of)
    return {
        name: block[name]
        for name in ("step", "layer", "num_tokens", "experts")
        if name in block
    }


def _rows(passes: ForwardPasses, records: Block) -> Block:
    """The rows of whole steps.

    A training step runs several micro-batches: the second record of a layer in a step
    belongs to the second one, and each is a forward pass of its own.
    """
    layer = records["layer"]
    tokens = records["num_tokens"]
    experts = records["experts"]
    step = np.cumsum(np.concatenate(([0], np.diff(records["step"]) != 0)))
    layers = int(layer.max()) + 1

    # Micro-batch of each record: how often its layer came before in its step.
    key = step * layers + layer
    by_key = np.argsort(key, kind="stable")
    begins = np.concatenate(([True], np.diff(key[by_key]) != 0))
    group_start = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    micro_batch = np.empty_like(by_key)
    micro_batch[by_key] = np.arange(len(by_key)) - group_start

    # Forward passes in order, each by layer.
    order = np.argsort((step * len(step) + micro_batch) * layers + layer, kind="stable")
    new_pass = (np.diff(step[order]) != 0) | (np.diff(micro_batch[order]) != 0)
    number = np.cumsum(np.concatenate(([0], new_pass)))

    # The rows of each record move with it.
    sizes = tokens[order]
    old_start = (np.cumsum(tokens) - tokens)[order]
    new_start = np.cumsum(sizes) - sizes
    moved = np.repeat(old_start - new_start, sizes) + np.arange(len(experts))
    return passes.rows(number, layer[order], sizes, np.take(experts, moved, axis=0))

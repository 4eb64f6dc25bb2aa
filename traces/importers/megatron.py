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
from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.rows import blocks
from moesim.traces.importers.readers.foreign import (
    Foreign,
    decoding,
    first_line,
    first_object,
    head,
    layout_error,
    line_chunks,
)
from moesim.traces.importers.readers.sequence_rows import (
    ForwardPasses,
    ended,
    occurrences,
)
from moesim.traces.importers.readers.tables import json_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

_KEYS = ("layer", "num_tokens", "rank", "step", "topk")
_STRUCTURE = {
    **dict.fromkeys(_KEYS, "DOUBLE"),
    "block": "VARCHAR",
    "top_indices": [["DOUBLE"]],
}
_DRAFT = "mtp"
# A record without a block is the decoder's.
_IS_DRAFT = re.compile(rb'"block"\s*:\s*"mtp"')


def recognises(path: Path) -> bool:
    """Whether the first line is a record, or begins like one (a record of many tokens
    is one long line).
    """
    # A record may have more keys, as those with hidden states beside it do.
    first = first_object(path)
    if isinstance(first, dict):
        return first.keys() >= set(_KEYS)

    start = head(path, 512).lstrip()
    has_keys = all(f'"{key}"'.encode() in start for key in _KEYS)
    return has_keys and start.startswith(b'{"step":')


def read(path: Path, _: ModelShape) -> Foreign:
    """The file's steps."""
    first = first_line(path)
    rank = None
    if first is not None:
        with decoding(path, f"line {first[0]}"):
            rank = json.loads(first[1])["rank"]
    if not isinstance(rank, int):
        raise layout_error(path, "rank", "a whole number", rank)

    drafts, has_files = _left_out(path)
    notes = ["steps of several tokens are taken as prompts: requests have no names"]
    if drafts:
        notes.append(f"{drafts} records of draft heads (block mtp) left out")
    if has_files:
        notes.append(
            "hidden states and logits in the files beside the trace are left out"
        )
    return Foreign(lambda: _steps(path), notes=notes, facts={"rank": rank})


def _left_out(path: Path) -> tuple[int, bool]:
    """How many records are of draft heads, and whether files lie beside the trace."""
    drafts = 0
    has_files = False
    for data in line_chunks(path):
        # Looking for a word first is many times faster than the expression.
        if _DRAFT.encode() in data:
            drafts += len(_IS_DRAFT.findall(data))
        has_files |= b'"hs_offset"' in data or b'"logit_offset"' in data
    return drafts, has_files


def _steps(path: Path) -> Iterator[Block]:
    """Rows of some whole steps at a time."""
    ids = "line.top_indices"
    fits = f"len({ids}) = line.num_tokens AND len(each) = line.topk"
    columns = {
        "step": "line.step",
        "layer": "line.layer",
        "record": "number",
        "experts": f"CASE WHEN {fits} THEN each END",
    }
    where = f"line.block IS DISTINCT FROM '{_DRAFT}'"
    passes = ForwardPasses()
    needed = "num_tokens lists of topk integers"
    records = json_rows(path, _STRUCTURE, columns, each=ids, where=where, needed=needed)
    rows: Block = {}
    for rows in ended(blocks(records), _last_step):
        yield _rows(passes, rows)
    if not rows:
        raise layout_error(
            path,
            "records",
            "at least one of the decoder",
            "none",
            "hooks do not fire under CUDA graphs",
        )


def _last_step(rows: Block) -> int:
    starts = np.flatnonzero(np.diff(rows["step"])) + 1
    return int(starts[-1]) if len(starts) else 0


def _rows(passes: ForwardPasses, rows: Block) -> Block:
    """The rows of whole steps.

    A training step runs several micro-batches: the second record of a layer in a step
    belongs to the second one, and each is a forward pass of its own.
    """
    starts = np.flatnonzero(np.diff(rows["record"], prepend=-1))
    tokens = np.diff(np.append(starts, len(rows["record"])))
    layer = rows["layer"][starts]
    step = np.cumsum(np.diff(rows["step"][starts], prepend=rows["step"][0]) != 0)
    # How often its layer came before in its step.
    micro_batch = occurrences(step << 32 | layer, {})

    # Forward passes in order, each by layer.
    order = np.lexsort((layer, micro_batch, step))
    new_pass = (np.diff(step[order]) != 0) | (np.diff(micro_batch[order]) != 0)
    number = np.cumsum(np.concatenate(([0], new_pass)))

    # The rows of each record move with it.
    sizes = tokens[order]
    new_start = np.cumsum(sizes) - sizes
    moved = np.repeat(starts[order] - new_start, sizes) + np.arange(len(rows["step"]))
    experts = np.take(rows["experts"], moved, axis=0)
    return passes.rows(number, layer[order], sizes, experts)

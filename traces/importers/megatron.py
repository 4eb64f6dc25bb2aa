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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.traces.format.parquet import numbers, values
from moesim.traces.format.sorting import Unordered
from moesim.traces.importers.readers.foreign import (
    NO_WEIGHTS,
    decoding,
    layout_error,
    layout_names,
)
from moesim.traces.importers.readers.json_lines import (
    JsonLinesReader,
    columns_of,
    is_null,
    list_lengths,
    list_values,
    whole_numbers,
)
from moesim.traces.importers.readers.sequence_rows import ForwardPasses, finished
from moesim.traces.importers.readers.text import (
    first_line,
    first_object,
    head,
    line_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.base.errors import TraceError
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.importers.readers.json_lines import JsonLines

    Block = dict[str, np.ndarray]

_KEYS = frozenset({"step", "layer", "rank", "num_tokens", "topk"})
_STRUCTURE = {
    **dict.fromkeys(sorted(_KEYS), "DOUBLE"),
    "block": "VARCHAR",
    "top_indices": [["DOUBLE"]],
}
ASKED = ("map",)
OPTIONS = {"map": "a key of a record=theirs, joined by commas"}
# What may stand on the left of a mapping; `experts` is our name.
_MAPPED = {name: name for name in _STRUCTURE} | {"experts": "top_indices"}
_DRAFT = "mtp"

# Steps are counted over a whole training run; layers and ids are 16-bit.
_STEPS = 1 << 53
_LAYERS = 1 << 16
_IDS = 1 << 16
_TOKENS = 1 << 31


class _Records(NamedTuple):
    """Records of the decoder. R records, N tokens in all.

    Attributes:
        step: int64 [R].
        layer: int64 [R].
        tokens: int64 [R], tokens of each.
        experts: uint16 [N, K], ids of all records, one record after the other.
    """

    step: np.ndarray
    layer: np.ndarray
    tokens: np.ndarray
    experts: np.ndarray


def recognises(path: Path, **given: str) -> bool:
    """Whether the first line is a record, or begins like one (a record of many tokens
    is one long line).
    """
    names = layout_names(path, given, _MAPPED)
    # A record may have more keys, as those with hidden states beside it do.
    keys = {names[key] for key in _KEYS}
    first = first_object(path)
    if isinstance(first, dict):
        return set(first) >= keys

    start = head(path, 512).lstrip()
    has_keys = all(f'"{key}"'.encode() in start for key in keys)
    return start.startswith(f'{{"{names["step"]}":'.encode()) and has_keys


def provenance(path: Path, **given: str) -> dict[str, Any]:
    """Rank, and remarks."""
    names = layout_names(path, given, _MAPPED)
    block = re.escape(names["block"])
    draft = re.compile(rf'"{block}"\s*:\s*"{_DRAFT}"'.encode())
    drafts = 0
    sidecars = False

    for data in line_chunks(path):
        # Looking for letters first is many times faster than the expression: others
        # seldom have "mt", and no "f".
        letters = np.frombuffer(data, np.uint8)
        behind_m = np.flatnonzero(letters[:-1] == ord("m")) + 1
        if (letters[behind_m] == ord("t")).any():
            drafts += len(draft.findall(data))
        if b"f" in data:
            sidecars |= b'"hs_offset"' in data or b'"logit_offset"' in data

    rank = _rank(path, names["rank"])
    if not isinstance(rank, int):
        raise layout_error(path, "rank", "a whole number", rank)

    notes = [
        NO_WEIGHTS,
        "steps of several tokens are taken as prompts: requests have no names",
    ]
    if drafts:
        notes.append(f"{drafts} records of draft heads (block mtp) left out")
    if sidecars:
        notes.append(
            "hidden states and logits in the files beside the trace are left out"
        )
    return {"rank": rank, "notes": notes}


def _rank(path: Path, key: str) -> Any:
    """The rank that the first record names; None without a record."""
    first = first_line(path)
    if first is None:
        return None
    number, text = first
    with decoding(path, f"line {number}"):
        return json.loads(text.rstrip())[key]


def read(path: Path, shape: ModelShape, **given: str) -> Unordered:
    """The file's steps."""
    names = layout_names(path, given, _MAPPED)
    return Unordered(
        lambda: _pieces(path, names), lambda block: finished(path, shape, block)
    )


def _pieces(path: Path, names: dict[str, str]) -> Iterator[Block]:
    """Rows of some whole steps at a time; `names` has what the file calls keys."""
    passes = ForwardPasses()
    pending: _Records | None = None

    reader = JsonLinesReader(_STRUCTURE, names)
    for lines in reader.read(path):
        top_k = 0 if pending is None else pending.experts.shape[1]
        records = _records(lines, top_k)
        if records is None:
            continue

        if pending is not None:
            # Behind the records of the step that was still open.
            parts = zip(pending, records, strict=True)
            records = _Records(*(np.concatenate(pair) for pair in parts))

        # The last step may go on in what is not read yet.
        step_starts = np.flatnonzero(np.diff(records.step)) + 1
        end = int(step_starts[-1]) if len(step_starts) else 0
        rows = int(records.tokens[:end].sum())
        if end:
            yield _rows(passes, _part(records, slice(end), slice(rows)))
        pending = _part(records, slice(end, None), slice(rows, None))

    if pending is None:
        raise layout_error(
            path,
            "records",
            "at least one of the decoder",
            "none",
            "hooks do not fire under CUDA graphs",
        )
    yield _rows(passes, pending)


def _part(records: _Records, of_records: slice, of_rows: slice) -> _Records:
    return _Records(
        records.step[of_records],
        records.layer[of_records],
        records.tokens[of_records],
        records.experts[of_rows],
    )


def _rows(passes: ForwardPasses, records: _Records) -> Block:
    """The rows of whole steps.

    A training step runs several micro-batches: the second record of a layer in a step
    belongs to the second one, and each is a forward pass of its own.
    """
    step, layer, tokens, experts = records
    step = np.cumsum(np.concatenate(([0], np.diff(step) != 0)))
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
    new_step = np.diff(step[order]) != 0
    new_pass = new_step | (np.diff(micro_batch[order]) != 0)
    number = np.cumsum(np.concatenate(([0], new_pass)))

    # The rows of each record move with it.
    sizes = tokens[order]
    old_start = (np.cumsum(tokens) - tokens)[order]
    new_start = np.cumsum(sizes) - sizes
    moved = np.repeat(old_start - new_start, sizes) + np.arange(len(experts))

    return passes.rows(
        number=number,
        layer=layer[order],
        tokens=sizes,
        experts=np.take(experts, moved, axis=0),
    )


def _records(lines: JsonLines, top_k: int) -> _Records | None:
    """The checked records of the decoder in some lines; None where there is none.

    Args:
        lines: the lines.
        top_k: how many ids a token must have; 0 takes it from the first record.
    """
    decoder = _of_decoder(lines)
    if not len(decoder.place):
        return None

    columns = columns_of(decoder.values)
    step = _numbers(decoder, columns["step"], _STEPS)
    layer = _numbers(decoder, columns["layer"], _LAYERS)
    tokens = _numbers(decoder, columns["num_tokens"], _TOKENS)
    width = _numbers(decoder, columns["topk"], _IDS)

    # One trace has one top-k.
    top_k = top_k or int(width[0])
    if (width != top_k).any():
        record = int((width != top_k).argmax())
        raise layout_error(
            lines.path,
            f"line {decoder.number(record)}: topk",
            str(top_k),
            width[record],
            "one trace has one top-k",
        )

    token_ids = list_values(columns["top_indices"])
    wrong = (list_lengths(columns["top_indices"]) != tokens) | (tokens == 0)
    if wrong.any():
        raise _wrong_ids(decoder, int(wrong.argmax()))

    # Which record a token belongs to, to name the record of a wrong one.
    record_of = np.repeat(np.arange(len(tokens)), tokens)
    wrong = list_lengths(token_ids) != top_k
    if wrong.any():
        raise _wrong_ids(decoder, int(record_of[wrong.argmax()]))

    ids, fault = whole_numbers(list_values(token_ids), _IDS)
    if fault >= 0:
        raise _wrong_ids(decoder, int(record_of[fault // top_k]))

    experts = ids.astype(np.uint16).reshape(-1, top_k)
    return _Records(step, layer, tokens, experts)


def _of_decoder(lines: JsonLines) -> JsonLines:
    """The lines but for records of draft heads; all must be records."""
    if not len(lines.place):
        return lines

    columns = columns_of(lines.values)
    for name in sorted(_KEYS):
        if columns[name].null_count:
            raise _not_a_record(lines, int(is_null(columns[name]).argmax()))

    # A record without a block is the decoder's.
    block = columns["block"]
    if block.null_count == len(block):
        return lines

    # `fill_null` would import pandas.
    encoded = block.dictionary_encode(null_encoding="encode")
    is_draft = np.array([name == _DRAFT for name in encoded.dictionary.to_pylist()])
    kept = np.flatnonzero(~is_draft[values(encoded.indices)])
    if len(kept) == len(block):
        return lines

    decoder_values = lines.values.take(numbers(kept))
    return lines._replace(place=lines.place[kept], values=decoder_values)


def _numbers(lines: JsonLines, column: Any, limit: int) -> np.ndarray:
    """int64 [R]: a column of whole numbers."""
    numbers_, fault = whole_numbers(column, limit)
    if fault >= 0:
        raise _wrong_numbers(lines, fault)
    return numbers_


def _not_a_record(lines: JsonLines, line: int) -> TraceError:
    record = lines.parsed(line)
    if isinstance(record, dict) and set(record) >= _KEYS:
        return _wrong_numbers(lines, line)

    actual = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    place = f"line {lines.number(line)}"
    expected = f"an object with {', '.join(sorted(_KEYS))}"
    return layout_error(lines.path, place, expected, actual)


def _wrong_numbers(lines: JsonLines, line: int) -> TraceError:
    record = lines.parsed(line)
    actual = ", ".join(f"{key} {record[key]}" for key in sorted(_KEYS))
    place = f"line {lines.number(line)}"
    return layout_error(lines.path, place, "whole numbers from 0", actual)


def _wrong_ids(lines: JsonLines, line: int) -> TraceError:
    record = lines.parsed(line)
    place = f"line {lines.number(line)}: top_indices"
    with decoding(lines.path, place):
        ids = np.array(record.get("top_indices"))

    expected = [record["num_tokens"], record["topk"]]
    if list(ids.shape) == expected and ids.size and ids.dtype.kind in "iu":
        actual = f"{ids.min()}..{ids.max()}"
        return layout_error(lines.path, place, "expert ids", actual)

    actual = f"{ids.dtype} {list(ids.shape)}"
    return layout_error(lines.path, place, f"{expected} integers", actual)

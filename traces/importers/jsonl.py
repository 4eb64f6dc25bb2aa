"""JSONL of routing, one object or list per line: by token and layer, or by token with a
list of layers.

Four layouts: ``{layer_idx, token_idx, selected_ids, gate_weights}`` (lattice; also
with `seq` and `phase`); ``{token, layers: [[ids], …]}`` or ``{pos, layers: [{experts,
weights}, …]}``; ``{layer, origin_rows, topk_experts: [[ids], …]}``, a batch at one
layer whose rows belong to these tokens; and lists ``[layer, e0, …, eK-1]`` behind an
object with ``top_k`` (imp), in lines or as one object that holds them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.parquet import codes, values
from moesim.traces.format.schema import Phase
from moesim.traces.format.sorting import Appearance, Unordered
from moesim.traces.importers.readers.foreign import (
    NO_WEIGHTS,
    PROMPT_TOKENS,
    PROMPT_TOKENS_NOTE,
    RESTARTS,
    TWICE,
    are_passes,
    layout_error,
    prompt_length,
)
from moesim.traces.importers.readers.json_lines import (
    is_null,
    list_lengths,
    list_values,
    whole_numbers,
)
from moesim.traces.importers.readers.jsonl_layouts import (
    ORIGINS,
    first_columns,
    has_key,
    keys_of,
    origins_are_requests,
    row_tables,
)
from moesim.traces.importers.readers.sequence_rows import finished, of_passes
from moesim.traces.importers.readers.text import first_object, head

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.importers.readers.jsonl_layouts import Keys, RowTable

    Block = dict[str, np.ndarray]

ASKED = ("map",)
OPTIONS = {
    "map": "our column=theirs, joined by commas",
    "prompt_tokens": PROMPT_TOKENS,
    "restarts": RESTARTS,
}
_PHASES = {
    "prefill": Phase.PREFILL,
    "prompt": Phase.PREFILL,
    "decode": Phase.DECODE,
    "generate": Phase.DECODE,
}
_IDS = 1 << 16
_POSITIONS = 1 << 31


def recognises(path: Path, **given: str) -> bool:
    """Whether the first line is a row, a token with layers, or an object with
    ``top_k``; or one such object in all.
    """
    first = first_object(path)
    if isinstance(first, dict):
        keys = keys_of(path, given)
        is_row = has_key(first, "layer", keys) and has_key(first, "experts", keys)
        is_placed = has_key(first, "pos", keys) or ORIGINS in first
        return "top_k" in first or (is_placed and ("layers" in first or is_row))

    start = head(path, 512).lstrip()
    return start.startswith(b"{") and (b'"top_k"' in start or b'"layers"' in start)


def provenance(path: Path, **given: str) -> dict[str, Any]:
    """Remarks on what is missing."""
    # The first rows speak for all; a mixture is refused while reading.
    columns = first_columns(path, keys_of(path, given))
    notes = [] if "weights" in columns else [NO_WEIGHTS]
    if not are_passes(path, given) and not {"phase", "prompt_tokens"} & {
        *columns,
        *given,
    }:
        notes.append(PROMPT_TOKENS_NOTE)
    first = first_object(path)
    if isinstance(first, dict) and ORIGINS in first and origins_are_requests(first):
        notes.append(
            f"several rows of a batch have one of {ORIGINS}: each is taken as a"
            " request, and its rows as its tokens"
        )
    return {"notes": notes}


def read(path: Path, shape: ModelShape, **given: str) -> Unordered:
    """The file's rows."""
    prompt = prompt_length(path, given)
    keys = keys_of(path, given)
    in_passes = are_passes(path, given)
    return Unordered(
        lambda: (
            of_passes(path, _pieces(path, keys)) if in_passes else _pieces(path, keys)
        ),
        lambda block: finished(path, shape, block, ("phase",), prompt, TWICE),
    )


def _pieces(path: Path, keys: Keys) -> Iterator[Block]:
    """Rows of some lines at a time; sequences are numbered by their first row."""
    sequences = Appearance()
    top_k = 0
    first: Block | None = None

    for table in row_tables(path, keys):
        # One trace has one top-k.
        if not top_k:
            top_k = _first_top_k(table)

        block = _checked(table, top_k)
        block["seq"] = _sequences(table, sequences)

        first = block if first is None else first
        if ("weights" in first) != ("weights" in block):
            raise _mixed_weights(table, row=0)
        yield block

    if first is None:
        raise layout_error(path, "rows", "at least one", "none")


def _first_top_k(table: RowTable) -> int:
    """How many experts the first row has: as many as every other one must have."""
    if table.experts is None or table.experts.null_count == len(table.experts):
        raise table.error(0, "experts", "a layer and its experts")

    top_k = int(list_lengths(table.experts)[0])
    if not top_k:
        raise table.error(0, "experts", "a layer and its experts")
    return top_k


def _checked(table: RowTable, top_k: int) -> Block:
    """The rows of a table but for their sequence; the first fault is named."""
    experts = _matrix(table, "experts", table.experts, top_k)
    # Values lie behind each other, `top_k` per row: that tells the row of a fault.
    ids, fault = whole_numbers(experts, _IDS)
    if fault >= 0:
        raise table.error(fault // top_k, "experts", f"expert ids 0..{_IDS - 1}")

    block = {
        "pos": _positions(table, "pos", table.pos),
        "layer": _positions(table, "layer", table.layer),
        "experts": ids.astype(np.uint16).reshape(-1, top_k),
        "phase": _phases(table),
    }

    if table.weights is not None:
        if table.weights.null_count:
            raise _mixed_weights(table, int(is_null(table.weights).argmax()))
        weights = _matrix(table, "weights", table.weights, top_k)
        if weights.null_count:
            fault = int(is_null(weights).argmax())
            raise table.error(fault // top_k, "weights", "numbers")
        block["weights"] = values(weights).astype(np.float32).reshape(-1, top_k)

    return block


def _mixed_weights(table: RowTable, row: int) -> Exception:
    return table.error(row, "weights", "weights in all rows or in none")


def _matrix(table: RowTable, name: str, column: Any, top_k: int) -> Any:
    """The values of a list column, which must have `top_k` in every row."""
    # A row without the key has a list of length 0.
    lengths = list_lengths(column)
    wrong = lengths != top_k
    if wrong.any():
        row = int(wrong.argmax())
        missing = column.null_count and is_null(column)[row]
        expected = "a layer and its experts" if missing else f"{top_k} values"
        raise table.error(row, name, expected)

    return list_values(column)


def _positions(table: RowTable, name: str, column: Any) -> np.ndarray:
    """int32 [N] of positions or layers."""
    expected = "a whole number from 0"
    if column is None:
        raise table.error(0, name, expected)

    positions, fault = whole_numbers(column, _POSITIONS)
    if fault >= 0:
        raise table.error(fault, name, expected)
    return positions.astype(np.int32)


def _phases(table: RowTable) -> np.ndarray:
    """int8 [N]: the phase of each row, decode where its line has none."""
    if table.phase is None:
        return np.full(len(table.line), Phase.DECODE, np.int8)

    names = list(_PHASES)
    phase = table.phase
    known = codes(phase.fill_null("decode") if phase.null_count else phase, names)
    if (known < 0).any():
        row = int(np.argmax(known[table.line] < 0))
        raise table.error(row, "phase", "prefill or decode")

    # By line first, of which there are fewer than rows.
    phase_of = np.array([_PHASES[name] for name in names], np.int8)
    phases: np.ndarray = phase_of[known][table.line]
    return phases


def _sequences(table: RowTable, sequences: Appearance) -> np.ndarray:
    """int32 [N]: sequences by their first row, whatever the file calls them."""
    if table.seq is None:
        return np.zeros(len(table.line), np.int32)

    # A line without a name belongs to sequence 0, as all do where no line has one.
    seq = table.seq
    named = (seq.fill_null("0") if seq.null_count else seq).dictionary_encode()
    index = values(named.indices)
    # Rows of a batch have names of their own.
    if len(index) != len(table.line):
        index = index[table.line]
    return sequences.of_labels(named.dictionary.to_pylist(), index)

"""Parquet rows of seq_id, step, phase, layer, token, expert_ids, scores.

Sequences are kept in the order of their first row. ``token`` is the absolute position; ``scores`` with one value per
selected expert are the combine weights; ``tok_hash`` is no token id and is left out.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from traces.arrow import codes, flat, values
from traces.errors import TraceError
from traces.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from traces.schema import ModelShape

    Block = dict[str, np.ndarray]

COLUMNS = ("seq_id", "phase", "layer", "token", "expert_ids")
_ROWS = 65_536
_PHASES = [phase.label for phase in Phase]


def recognises(path: Path) -> bool:
    """Whether this is Parquet with the columns of the layout."""
    try:
        names = pq.read_schema(path).names
    except (pa.ArrowException, OSError, ValueError):
        return False
    return set(COLUMNS) <= set(names)


def provenance(path: Path) -> dict[str, Any]:
    """Source, licence and model from the file's own metadata, sequence names, and remarks on oddities."""
    metadata = {key.decode(): value.decode() for key, value in (pq.read_schema(path).metadata or {}).items()}
    known = {key: metadata[key] for key in ("source", "licence", "license", "model", "note") if key in metadata}
    names, _, scored = _survey(path)
    notes = [] if scored else ["no combine weights in the source"]
    if "ascending" in metadata.get("note", ""):
        notes.append("experts are ordered by id, their rank is lost")
    try:
        sequences = json.loads(metadata.get("sequences", "[]"))
        degenerate = [entry["seq_id"] for entry in sequences if entry.get("repetition")]
    except (ValueError, TypeError, KeyError, AttributeError):
        degenerate = []
    if degenerate:
        notes.append(f"{len(degenerate)} of {len(names)} sequences are degenerate repetition, kept")
    return {
        **known,
        "sequences": names,
        "degenerate": [number for number, name in enumerate(names) if name in set(degenerate)],
        "notes": notes,
    }


def read(path: Path, shape: ModelShape) -> Iterator[Block]:
    """Blocks of one sequence each; sequences whose rows lie apart are gathered first, which needs them in memory."""
    del shape
    names, contiguous, scored = _survey(path)
    number = {name: index for index, name in enumerate(names)}
    pieces: list[Block] = []
    if contiguous:
        for block in _blocks(path, number, scored):
            edges = [0, *(np.flatnonzero(np.diff(block["seq"])) + 1).tolist(), len(block["seq"])]
            for start, stop in pairwise(edges):
                if pieces and pieces[0]["seq"][0] != block["seq"][start]:
                    yield _sorted(path, pieces)
                    pieces = []
                pieces.append({name: column[start:stop] for name, column in block.items()})
        if pieces:
            yield _sorted(path, pieces)
        return
    whole = list(_blocks(path, number, scored))
    for index in range(len(names)):
        yield _sorted(path, [{name: b[name][b["seq"] == index] for name in b} for b in whole if index in b["seq"]])


def _sorted(path: Path, pieces: list[Block]) -> Block:
    """Join the pieces of one sequence, sorted by pos, layer."""
    widths = {piece["experts"].shape[1] for piece in pieces}
    if len(widths) > 1:
        raise TraceError(f"{path}: expert_ids: expected the same top-k in all rows, got {sorted(widths)}")
    rows = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    order = np.lexsort((rows["layer"], rows["pos"]))
    return {name: column[order] for name, column in rows.items()}


def _batches(path: Path, columns: list[str]) -> Iterator[tuple[int, Any]]:
    """Record batches with the number of their first row."""
    base = 0
    with pq.ParquetFile(path, pre_buffer=False) as file:
        batches = file.iter_batches(_ROWS, columns=columns, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                reason = (str(error).splitlines() or ["unreadable"])[0]
                raise TraceError(f"{path}: after row {base}: {reason}; was it cut off while copying?") from None
            if batch is None:
                return
            yield base, batch
            base += batch.num_rows


def _survey(path: Path) -> tuple[list[str], bool, bool]:
    """Sequence names by first appearance, whether each lies in one piece, whether all rows have scores."""
    names: dict[str, None] = {}
    last = None
    contiguous = True
    scored = "scores" in pq.read_schema(path).names
    for base, batch in _batches(path, ["seq_id", *(["scores"] if scored else [])]):
        column = batch.column("seq_id")
        if column.null_count:
            raise TraceError(f"{path}: after row {base}: seq_id: expected a name, got null")
        if not isinstance(column, pa.DictionaryArray):
            column = column.dictionary_encode()
        labels = [str(label) for label in column.dictionary.to_pylist()]
        index = values(column.indices)
        for place in [0, *(np.flatnonzero(np.diff(index)) + 1).tolist()] if len(index) else []:
            label = labels[index[place]]
            if label != last:
                contiguous &= label not in names
                names[label] = None
                last = label
        scored = scored and not batch.column("scores").null_count
    return list(names), contiguous, scored


def _blocks(path: Path, number: dict[str, int], scored: bool) -> Iterator[Block]:
    """The file's rows as arrays, in file order."""
    for base, batch in _batches(path, [*COLUMNS, *(["scores"] if scored else [])]):
        for name in batch.schema.names:
            if batch.column(name).null_count:
                raise TraceError(f"{path}: after row {base}: {name}: expected a value in every row, got null")
        ids = batch.column("seq_id")
        if not isinstance(ids, pa.DictionaryArray):
            ids = ids.dictionary_encode()
        order = np.array([number[str(label)] for label in ids.dictionary.to_pylist()], dtype=np.int32)
        phase = codes(batch.column("phase"), _PHASES)
        if (phase < 0).any():
            raise TraceError(f"{path}: row {base + int(np.argmin(phase))}: phase: expected prefill or decode")
        block = {
            "seq": order[values(ids.indices)],
            "pos": values(batch.column("token")),
            "phase": phase,
            "layer": values(batch.column("layer")),
            "experts": _matrix(path, base, "expert_ids", batch.column("expert_ids")),
        }
        if scored:
            scores = _matrix(path, base, "scores", batch.column("scores"))
            block["weights" if scores.shape[1] == block["experts"].shape[1] else "scores"] = scores
        yield block


def _matrix(path: Path, base: int, name: str, array: Any) -> np.ndarray:
    """[N, K] of a list column with equally long, complete rows."""
    lengths = np.diff(values(array.offsets))
    if len(lengths) and (lengths != lengths[0]).any():
        row = int(np.argmax(lengths != lengths[0]))
        raise TraceError(f"{path}: row {base + row}: {name}: expected {lengths[0]} values, got {lengths[row]}")
    inner = flat(array)
    if inner.null_count:
        row = int(np.argmax(inner.is_null().to_numpy(zero_copy_only=False))) // int(lengths[0])
        raise TraceError(f"{path}: row {base + row}: {name}: expected numbers, got null")
    return values(inner).reshape(len(lengths), -1)

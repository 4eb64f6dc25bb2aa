"""Parquet rows of seq_id, step, phase, layer, token, expert_ids, scores.

Sequences are kept in the order of their first row. ``token`` is the absolute position;
``scores`` with one value per selected expert are the combine weights; ``tok_hash`` is
no token id and is left out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from moesim.traces.errors import TraceError
from moesim.traces.format.arrow import codes, flat, values
from moesim.traces.format.schema import Phase
from moesim.traces.format.sorting import BATCH_ROWS, Unordered
from moesim.traces.importers.readers.foreign import NO_WEIGHTS, Once

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

COLUMNS = ("seq_id", "phase", "layer", "token", "expert_ids")
_PHASES = [phase.label for phase in Phase]


def recognises(path: Path) -> bool:
    """Whether this is Parquet with the columns of the layout."""
    try:
        names = pq.read_schema(path).names
    except (pa.ArrowException, OSError, ValueError):
        return False
    return set(COLUMNS) <= set(names)


def provenance(path: Path) -> dict[str, Any]:
    """Source, licence and model from the file's own metadata, sequence names, and
    remarks on oddities.
    """
    metadata = {
        key.decode(): value.decode()
        for key, value in (pq.read_schema(path).metadata or {}).items()
    }
    known = {
        key: metadata[key]
        for key in ("source", "licence", "license", "model", "note")
        if key in metadata
    }
    names, scored = _surveyed.kept(path)
    notes = [] if scored else [NO_WEIGHTS]
    if "ascending" in metadata.get("note", ""):
        notes.append("experts are ordered by id, their rank is lost")
    try:
        sequences = json.loads(metadata.get("sequences", "[]"))
        degenerate = [entry["seq_id"] for entry in sequences if entry.get("repetition")]
    except (ValueError, TypeError, KeyError, AttributeError):
        degenerate = []
    if degenerate:
        notes.append(
            f"{len(degenerate)} of {len(names)} sequences are degenerate repetition,"
            " kept"
        )
    return {
        **known,
        "sequences": names,
        "degenerate": [
            number for number, name in enumerate(names) if name in set(degenerate)
        ],
        "notes": notes,
    }


def read(path: Path, shape: ModelShape) -> Unordered:
    """The file's rows; runtimes write them step by step and layer by layer."""
    del shape

    def pieces() -> Iterator[Block]:
        names, scored = _surveyed.kept(path)
        return _blocks(path, {name: index for index, name in enumerate(names)}, scored)

    return Unordered(pieces)


def _batches(path: Path, columns: list[str]) -> Iterator[tuple[int, Any]]:
    """Record batches with the number of their first row."""
    base = 0
    with pq.ParquetFile(path, pre_buffer=False) as file:
        batches = file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                reason = (str(error).splitlines() or ["unreadable"])[0]
                raise TraceError(
                    f"{path}: after row {base}: {reason}; was it cut off while copying?"
                ) from None
            if batch is None:
                return
            yield base, batch
            base += batch.num_rows


def _survey(path: Path) -> tuple[list[str], bool]:
    """Sequence names by first appearance, and whether all rows have scores."""
    names: dict[str, None] = {}
    scored = "scores" in pq.read_schema(path).names
    for base, batch in _batches(path, ["seq_id", *(["scores"] if scored else [])]):
        column = batch.column("seq_id")
        if column.null_count:
            raise TraceError(
                f"{path}: after row {base}: seq_id: expected a name, got null"
            )
        if not isinstance(column, pa.DictionaryArray):
            column = column.dictionary_encode()
        labels = [str(label) for label in column.dictionary.to_pylist()]
        index = values(column.indices)
        changes = np.flatnonzero(np.concatenate(([True], np.diff(index) != 0)))[
            : len(index)
        ]
        names |= dict.fromkeys(
            labels[label] for label in dict.fromkeys(index[changes].tolist())
        )
        scored = scored and not batch.column("scores").null_count
    return list(names), scored


_surveyed = Once(_survey)


def _blocks(path: Path, number: dict[str, int], scored: bool) -> Iterator[Block]:
    """The file's rows as arrays, in file order."""
    width = 0
    for base, batch in _batches(path, [*COLUMNS, *(["scores"] if scored else [])]):
        for name in batch.schema.names:
            if batch.column(name).null_count:
                raise TraceError(
                    f"{path}: after row {base}: {name}: expected a value in every row,"
                    " got null"
                )
        ids = batch.column("seq_id")
        if not isinstance(ids, pa.DictionaryArray):
            ids = ids.dictionary_encode()
        order = np.array(
            [number[str(label)] for label in ids.dictionary.to_pylist()], dtype=np.int32
        )
        phase = codes(batch.column("phase"), _PHASES)
        if (phase < 0).any():
            raise TraceError(
                f"{path}: row {base + int(np.argmin(phase))}: phase: expected prefill"
                " or decode"
            )
        block = {
            "seq": order[values(ids.indices)],
            "pos": values(batch.column("token")),
            "phase": phase,
            "layer": values(batch.column("layer")),
            "experts": _matrix(path, base, "expert_ids", batch.column("expert_ids")),
        }
        width = width or block["experts"].shape[1]
        if block["experts"].shape[1] != width:
            found = sorted((width, block["experts"].shape[1]))
            raise TraceError(
                f"{path}: expert_ids: expected the same top-k in all rows, got {found}"
            )
        if scored:
            scores = _matrix(path, base, "scores", batch.column("scores"))
            block[
                "weights" if scores.shape[1] == block["experts"].shape[1] else "scores"
            ] = scores
        yield block


def _matrix(path: Path, base: int, name: str, array: Any) -> np.ndarray:
    """[N, K] of a list column with equally long, complete rows."""
    lengths = np.diff(values(array.offsets))
    if len(lengths) and (lengths != lengths[0]).any():
        row = int(np.argmax(lengths != lengths[0]))
        raise TraceError(
            f"{path}: row {base + row}: {name}: expected {lengths[0]} values, got"
            f" {lengths[row]}"
        )
    inner = flat(array)
    if inner.null_count:
        row = int(np.argmax(inner.is_null().to_numpy(zero_copy_only=False))) // int(
            lengths[0]
        )
        raise TraceError(
            f"{path}: row {base + row}: {name}: expected numbers, got null"
        )
    return values(inner).reshape(len(lengths), -1)

"""Parquet rows of seq_id, step, phase, layer, token, expert_ids, scores.

Sequences are kept in the order of their first row. ``token`` is the absolute position;
``scores`` with one value per selected expert are the combine weights; ``tok_hash`` is
no token id and is left out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from moesim.traces.format.parquet import read_schema
from moesim.traces.format.sorting import Unordered
from moesim.traces.importers import columns
from moesim.traces.importers.readers.foreign import NO_WEIGHTS, ParseCache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

_MAPPING = {
    "seq": ["seq_id"],
    "pos": ["token"],
    "phase": ["phase"],
    "layer": ["layer"],
    "experts": ["expert_ids"],
}
_METADATA = ("source", "licence", "license", "model", "note")


class _Overview(NamedTuple):
    """Sequence names by first appearance, and whether all rows have scores."""

    names: list[str]
    has_scores: bool


def recognises(path: Path) -> bool:
    """Whether this is Parquet with the columns of the layout."""
    try:
        names = read_schema(path).names
    except (pa.ArrowException, OSError, ValueError):
        return False

    needed = {theirs for (theirs,) in _MAPPING.values()}
    return needed <= set(names)


def provenance(path: Path) -> dict[str, Any]:
    """Source, licence and model from the file's own metadata, sequence names, and
    remarks on oddities.
    """
    metadata = {
        key.decode(): value.decode()
        for key, value in (read_schema(path).metadata or {}).items()
    }
    overview: _Overview = _overview.get(path)

    names = overview.names
    notes = [] if overview.has_scores else [NO_WEIGHTS]
    if "ascending" in metadata.get("note", ""):
        notes.append("experts are ordered by id, their rank is lost")

    degenerate = _degenerate(metadata)
    if degenerate:
        notes.append(
            f"{len(degenerate)} of {len(names)} sequences are degenerate repetition,"
            " kept"
        )

    return {
        **{key: metadata[key] for key in _METADATA if key in metadata},
        "sequences": names,
        "degenerate": [
            number for number, name in enumerate(names) if name in set(degenerate)
        ],
        "notes": notes,
    }


def _degenerate(metadata: dict[str, str]) -> list[str]:
    """Names of the sequences that the file's metadata calls repetition."""
    try:
        sequences = json.loads(metadata.get("sequences", "[]"))
        return [entry["seq_id"] for entry in sequences if entry.get("repetition")]
    except (ValueError, TypeError, KeyError, AttributeError):
        # Metadata of another shape says nothing about repetition.
        return []


def read(path: Path, shape: ModelShape) -> Unordered:
    """The file's rows; runtimes write them step by step and layer by layer."""
    del shape

    def pieces() -> Iterator[Block]:
        overview: _Overview = _overview.get(path)
        scores = {"scores": ["scores"]} if overview.has_scores else {}
        for block in columns.pieces(path, _MAPPING | scores):
            if scores:
                values = block.pop("scores")
                # One value per chosen expert, or one for each of the model.
                per_choice = values.shape == block["experts"].shape
                block["weights" if per_choice else "scores"] = values
            yield block

    return Unordered(pieces)


def _read_overview(path: Path) -> _Overview:
    names: dict[str, None] = {}
    has_scores = "scores" in read_schema(path).names

    needed = ["seq_id", "scores"] if has_scores else ["seq_id"]
    for batch in columns.batches(path, needed):
        labels = batch.column("seq_id").unique().to_pylist()
        names |= dict.fromkeys(map(str, labels))
        has_scores = has_scores and not batch.column("scores").null_count

    return _Overview(list(names), has_scores)


_overview = ParseCache(_read_overview)

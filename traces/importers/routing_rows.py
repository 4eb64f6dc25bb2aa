"""Parquet rows of seq_id, step, phase, layer, token, expert_ids, scores.

Sequences are kept in the order of their first row. ``token`` is the absolute position;
``scores`` with one value per selected expert are the combine weights; ``tok_hash`` is
no token id and is left out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from moesim.traces.format.parquet import read_metadata
from moesim.traces.format.rows import blocks
from moesim.traces.importers.readers.foreign import Foreign
from moesim.traces.importers.readers.tables import parquet_names, parquet_rows

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


def recognises(path: Path) -> bool:
    """Whether this is Parquet with the columns of the layout."""
    needed = {theirs for (theirs,) in _MAPPING.values()}
    return needed <= set(parquet_names(path))


def read(path: Path, _: ModelShape) -> Foreign:
    """The file's rows, which runtimes write step by step and layer by layer; source,
    licence and model from its own metadata, and names of its sequences.
    """
    names, has_scores = _overview(path)
    mapping = _MAPPING | ({"scores": ["scores"]} if has_scores else {})

    def pieces() -> Iterator[Block]:
        for block in blocks(parquet_rows(path, mapping)):
            # One value per chosen expert, or one for each of the model.
            if has_scores and block["scores"].shape == block["experts"].shape:
                block["weights"] = block.pop("scores")
            yield block

    metadata = {
        key.decode(): value.decode() for key, value in read_metadata(path).items()
    }
    notes = []
    if "ascending" in metadata.get("note", ""):
        notes.append("experts are ordered by id, their rank is lost")
    degenerate = _degenerate(metadata)
    if degenerate:
        notes.append(
            f"the file marks {len(degenerate)} of {len(names)} sequences as degenerate"
            " repetition, kept; `trace check` counts loops that routing itself shows"
        )
    facts = {key: metadata[key] for key in _METADATA if key in metadata} | {
        "sequences": names,
        "degenerate": [at for at, name in enumerate(names) if name in degenerate],
    }
    return Foreign(pieces, notes=notes, facts=facts)


def _degenerate(metadata: dict[str, str]) -> list[str]:
    """Names of the sequences that the file's metadata calls repetition."""
    try:
        sequences = json.loads(metadata.get("sequences", "[]"))
        return [entry["seq_id"] for entry in sequences if entry.get("repetition")]
    except (ValueError, TypeError, KeyError, AttributeError):
        # Metadata of another shape says nothing about repetition.
        return []


def _overview(path: Path) -> tuple[list[str], bool]:
    """Sequence names by first appearance, and whether all rows have scores."""
    names: dict[str, None] = {}
    has_scores = "scores" in parquet_names(path)
    needed = {"seq": ["seq_id"]} | ({"scores": ["scores"]} if has_scores else {})
    for rows in parquet_rows(path, needed):
        labels = rows.columns["seq"][0].unique().to_pylist()
        names |= dict.fromkeys(map(str, labels))
        has_scores = has_scores and not rows.columns["scores"][0].null_count
    return list(names), has_scores

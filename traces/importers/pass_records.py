"""Little-endian int32 records ``layer, tokens, top-k, ids…``: tokens x top-k ids of one
layer of a forward pass, best first.

A pass ends where the layer does not rise; each is a sequence of its own, all prompt,
because nothing says whose tokens they are. A layer with fewer tokens holds the last
ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.schema import Phase
from moesim.traces.importers.readers.foreign import NO_WEIGHTS, layout_error
from moesim.traces.importers.readers.sequence_rows import finished

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

_HEAD = 3
# Numbers beyond these are another format's bytes.
_LIMITS = (1 << 12, 1 << 24, 1 << 8)
# So many whole records tell this layout from others.
_RECOGNISED = 16


def recognises(path: Path) -> bool:
    """Whether the first records chain: sane counts, one top-k, ids in between."""
    if path.stat().st_size % 4 or path.stat().st_size < 4 * (_HEAD + 1):
        return False
    data = np.memmap(path, "<i4", "r")
    at = 0
    top_k = int(data[2])
    for _ in range(_RECOGNISED):
        if at == len(data):
            return True
        if not _is_head(data[at : at + _HEAD], top_k):
            return False
        end = at + _HEAD + int(data[at + 1]) * top_k
        ids = data[at + _HEAD : end]
        if end > len(data) or not 0 <= ids.min() <= ids.max() < 1 << 16:
            return False
        at = end
    return True


def _is_head(numbers: np.ndarray, top_k: int) -> bool:
    in_range = len(numbers) == _HEAD and all(
        0 <= number < limit for number, limit in zip(numbers, _LIMITS, strict=True)
    )
    return in_range and bool(numbers[1] > 0) and 0 < top_k == numbers[2]


def provenance(path: Path) -> dict[str, Any]:
    """Nothing but remarks: the file says nothing about itself."""
    del path
    note = "the source does not tell whose tokens a pass has: each is a prompt"
    return {"notes": [NO_WEIGHTS, note]}


def read(path: Path, shape: ModelShape) -> Iterator[Block]:
    """The file's passes, a sequence each."""
    for number, records in enumerate(_passes(path)):
        tokens = max(len(ids) for _, ids in records)
        layer = np.repeat(
            [layer for layer, _ in records], [len(ids) for _, ids in records]
        )
        pos = np.concatenate(
            [np.arange(tokens - len(ids), tokens) for _, ids in records]
        )
        order = np.lexsort((layer, pos))
        block = {
            "seq": np.full(len(pos), number, np.int32),
            "pos": pos[order].astype(np.int32),
            "layer": layer[order].astype(np.int32),
            "experts": np.concatenate([ids for _, ids in records])[order],
            "phase": np.full(len(pos), Phase.PREFILL, np.int8),
        }
        yield finished(path, shape, block)


def _passes(path: Path) -> Iterator[list[tuple[int, np.ndarray]]]:
    """Layers and their ids [T, K], pass by pass."""
    data = np.memmap(path, "<i4", "r")
    top_k = int(data[2])
    records: list[tuple[int, np.ndarray]] = []
    at = 0
    while at < len(data):
        numbers = data[at : at + _HEAD]
        end = at + _HEAD + (int(numbers[1]) * top_k if len(numbers) == _HEAD else 1)
        if not _is_head(numbers, top_k) or end > len(data):
            raise layout_error(
                path,
                f"byte {4 * at:,}",
                f"a whole record layer, tokens, {top_k}, ids",
                numbers.tolist(),
                "was it cut off while copying?",
            )
        layer = int(numbers[0])
        if records and layer <= records[-1][0]:
            yield records
            records = []
        records.append((layer, data[at + _HEAD : end].reshape(-1, top_k)))
        at = end
    yield records

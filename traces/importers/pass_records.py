"""Little-endian int32 records ``layer, tokens, top-k, ids…``: tokens x top-k ids of one
layer of a forward pass, best first.

A pass ends where the layer does not rise; each is a sequence of its own, all prompt,
because nothing says whose tokens they are. A layer with fewer tokens holds the last
ones.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from moesim.base.errors import TraceError
from moesim.traces.importers.readers.foreign import Foreign, layout_error

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
    size = path.stat().st_size
    if size % 4 or size <= 4 * _HEAD:
        return False
    try:
        for _, ids in islice(_records(path), _RECOGNISED):
            if not 0 <= ids.min() <= ids.max() < 1 << 16:
                return False
    except TraceError:
        return False
    return True


def read(path: Path, _: ModelShape) -> Foreign:
    """The file's passes, a sequence each."""
    note = "the source does not tell whose tokens a pass has: each is a prompt"
    return Foreign(lambda: _pieces(path), passes=True, notes=[note])


def _pieces(path: Path) -> Iterator[Block]:
    """The passes, one by one."""
    records: list[tuple[int, np.ndarray]] = []
    for layer, ids in _records(path):
        if records and layer <= records[-1][0]:
            yield _rows(records)
            records = []
        records.append((layer, ids))
    yield _rows(records)


def _rows(records: list[tuple[int, np.ndarray]]) -> Block:
    sizes = [len(ids) for _, ids in records]
    tokens = max(sizes)
    return {
        "seq": np.zeros(sum(sizes), np.int32),
        "pos": np.concatenate([np.arange(tokens - size, tokens) for size in sizes]),
        "layer": np.repeat([layer for layer, _ in records], sizes),
        "experts": np.concatenate([ids for _, ids in records]),
    }


def _records(path: Path) -> Iterator[tuple[int, np.ndarray]]:
    """Layers and their ids [T, K]."""
    size = path.stat().st_size
    top_k = 0
    with path.open("rb") as file:
        while (at := file.tell()) < size:
            numbers = np.fromfile(file, "<i4", _HEAD).tolist()
            top_k = top_k or numbers[-1]
            count = 0
            if len(numbers) == _HEAD and all(map(_is_below, numbers, _LIMITS)):
                count = numbers[1] * top_k
            # What claims more than there is must not fill the memory.
            is_whole = 0 < 4 * count <= size - file.tell() and numbers[2] == top_k
            ids = np.fromfile(file, "<i4", count) if is_whole else np.empty(0)
            if not 0 < count == len(ids):
                raise layout_error(
                    path,
                    f"byte {at:,}",
                    f"a whole record layer, tokens, {top_k}, ids",
                    numbers,
                    "was it cut off while copying?",
                )
            yield numbers[0], ids.reshape(-1, top_k)


def _is_below(number: int, limit: int) -> bool:
    return 0 <= number < limit

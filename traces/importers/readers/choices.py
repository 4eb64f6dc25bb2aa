"""Rows of one selected expert each, gathered to rows of all experts of a token and
layer.

Engines write the K rows of a token and layer one after the other, by rank, and then
they are gathered as they are read. Where some stand apart, the file is read again and
sorted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.sorting import ApartError
from moesim.traces.importers.readers.foreign import layout_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    Block = dict[str, np.ndarray]

# The rows of a token and layer agree in these, and may differ in all others.
_CELL = ("seq", "pos", "layer", "phase", "token")
_RENAMED = {"expert": "experts", "weight": "weights"}


class Choices:
    """Gathers the rows of one file; rows of lists stay as they are.

    Args:
        path: the file, for errors.
        counts_from_zero: ranks are 0 to K-1, not in any numbers that ascend.
    """

    def __init__(self, path: Path, *, counts_from_zero: bool = False) -> None:
        self._path = path
        self._counts_from_zero = counts_from_zero
        self._stand_apart = False

    def gathered(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Return rows of all experts, or of one where the rows of some stand apart.

        Raises:
            ApartError: it is now known that they do.
        """
        top_k = 0
        rows_before = 0
        pending: Block = {}
        for block in blocks:
            count = len(block["seq"])
            if "expert" in block and "rank" not in block:
                # Without a rank, the experts of a token are as the file orders them.
                rank = np.arange(rows_before, rows_before + count)
                yield block | {"rank": rank}
                rows_before += count
                continue
            if self._stand_apart or "expert" not in block:
                yield block
                continue
            rows = {
                name: np.concatenate((pending[name], column)) if pending else column
                for name, column in block.items()
            }
            top_k = top_k or int(_starts(rows)[1])
            # The last one may go on in what is not read yet.
            end = len(rows["rank"]) // top_k * top_k
            yield self._cells(
                {name: column[:end] for name, column in rows.items()}, top_k
            )
            pending = {name: column[end:] for name, column in rows.items()}
        if pending and len(pending["rank"]):
            raise self._apart()

    def _cells(self, rows: Block, top_k: int) -> Block:
        """A row for every K rows."""
        cells = {name: column.reshape(-1, top_k) for name, column in rows.items()}
        same = [cells[name] for name in _CELL if name in cells]
        if not self._ascends(cells["rank"]) or any(map(_differs, same)):
            raise self._apart()
        return _named(cells)

    def _ascends(self, rank: np.ndarray) -> bool:
        """Whether the ranks [N, K] of all cells ascend one by one."""
        first = 0 if self._counts_from_zero else rank[0, 0]
        return bool((rank == first + np.arange(rank.shape[1])).all())

    def _apart(self) -> ApartError:
        self._stand_apart = True
        return ApartError()

    def whole(self, block: Block) -> Block:
        """Return the rows of a whole sequence, sorted, as rows of all experts."""
        if "expert" not in block:
            return block
        # Sorted by rank as well, so the experts of a cell are best first.
        edges = _starts(block)
        sizes = np.diff(edges)
        top_k = int(sizes[0])
        wrong = sizes != top_k
        if not wrong.any():
            cells = {name: column.reshape(-1, top_k) for name, column in block.items()}
            if not self._counts_from_zero or self._ascends(cells["rank"]):
                return _named(cells)
            wrong = (cells["rank"] != np.arange(top_k)).any(axis=1)
        row = edges[int(wrong.argmax())]
        place = ", ".join(f"{name} {block[name][row]}" for name in _CELL[:3])
        ranks = block["rank"][block["pos"] == block["pos"][row]]
        expected = f"{top_k} rows, one per expert and rank"
        raise layout_error(self._path, place, expected, f"ranks {ranks[:20].tolist()}")


def _starts(rows: Block) -> np.ndarray:
    """Where a token or layer begins, and the number of rows."""
    changes = [np.diff(rows[name]) != 0 for name in _CELL[:3]]
    inner = np.flatnonzero(np.any(changes, axis=0)) + 1
    return np.concatenate(([0], inner, [len(rows["pos"])]))


def _differs(cells: np.ndarray) -> bool:
    """Whether the rows of any cell of [N, K] disagree."""
    return bool((cells[:, 1:] != cells[:, :1]).any())


def _named(cells: Block) -> Block:
    """Cells [N, K] as a trace has them, with one value [N] where their rows agree."""
    # A copy lets go of the other values.
    return {
        _RENAMED.get(name, name): column[:, 0].copy() if name in _CELL else column
        for name, column in cells.items()
        if name != "rank"
    }

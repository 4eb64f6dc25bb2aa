"""Rows in any order become whole sequences, one behind the other, each sorted by pos
and layer.

Most files keep a sequence together, and then one sequence at a time is sorted in
memory. A file whose sequences are interleaved is read again: a small one is sorted in
memory, a large one by DuckDB, which spills what exceeds its share of memory into a
folder beside the trace that is being made. So memory is bounded by the longest
sequence, not by the file.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from moesim.traces.errors import TraceError
from moesim.traces.format.arrow import numbers, values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    Block = dict[str, np.ndarray]

IN_MEMORY_BYTES = 64 << 20
"""Interleaved rows up to here are sorted in memory."""
MEMORY_LIMIT = "256MB"
"""What DuckDB may hold; the rest lies in files."""
BATCH_ROWS = 65_536
KEYS = ("seq", "pos", "layer", "rank")
"""Rows are sorted by these, as far as a file has them; numbers below 2**31, `rank`
below 2**63.
"""


class ApartError(Exception):
    """A sequence goes on behind another one: the file has to be read again and sorted
    as a whole.
    """


@dataclass(frozen=True, slots=True)
class Unordered:
    """Rows of a file in the order of the file.

    Attributes:
        pieces: begins to read the file; every piece has the same columns and widths.
            Sequences are numbered by their first row.
        finish: what becomes of each whole, sorted sequence.
    """

    pieces: Callable[[], Iterable[Block]]
    finish: Callable[[Block], Block] = lambda block: block

    def grouped(self) -> Iterator[Block]:
        """Sequence by sequence, each sorted in memory.

        Raises:
            ApartError: a sequence goes on behind another one.
        """
        for block in whole_sequences(self.pieces()):
            yield self.finish(_sorted(block))

    def sorted(
        self, beside: Path, progress: Callable[[int], None] | None = None
    ) -> Iterator[Block]:
        """The same for interleaved sequences.

        Args:
            beside: the file to be made; a folder for what does not fit into memory
                appears beside it meanwhile.
            progress: called with the number of rows read so far, where they are many.

        Raises:
            TraceError: no room for the folder.
        """
        pieces = iter(self.pieces())
        held: list[Block] = []
        size = 0
        for piece in pieces:
            held.append(piece)
            size += sum(column.nbytes for column in piece.values())
            if size > IN_MEMORY_BYTES:
                blocks = _external(chain(held, pieces), piece, beside, progress)
                held = []
                break
        else:
            blocks = iter([_sorted(joined(held))] if held else [])
        for block in whole_sequences(blocks):
            yield self.finish(block)


class Appearance:
    """Numbers sequences from 0 by their first row, whatever the file calls them."""

    def __init__(self) -> None:
        self._number: dict[object, int] = {}
        # Label -> number, for small whole numbers.
        self._table = np.full(0, -1, np.int32)

    def of_labels(self, labels: list[object], index: np.ndarray) -> np.ndarray:
        """int32 [N] of labels [D] and which of them each row has, int [N]."""
        order = np.full(len(labels), -1, np.int32)
        _, first = np.unique(index, return_index=True)
        for place in np.sort(first):
            label = index[place]
            order[label] = self._number.setdefault(labels[label], len(self._number))
        return np.asarray(order[index])

    def of_numbers(self, labels: np.ndarray) -> np.ndarray:
        """int32 [N] of whole numbers [N]."""
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < 1 << 24:
            known, index = np.unique(labels, return_inverse=True)
            return self.of_labels(list(known.tolist()), index.reshape(-1))
        top = int(labels.max(initial=-1)) + 1
        if top > len(self._table):
            longer = np.full(max(top, 2 * len(self._table)), -1, np.int32)
            longer[: len(self._table)] = self._table
            self._table = longer
        found = self._table[labels]
        if (found < 0).any():
            fresh, first = np.unique(labels[found < 0], return_index=True)
            for label in fresh[np.argsort(first)].tolist():
                self._table[label] = self._number.setdefault(label, len(self._number))
            found = self._table[labels]
        return found


def joined(pieces: list[Block]) -> Block:
    """Pieces with the same columns behind each other."""
    if len(pieces) == 1:
        return pieces[0]
    return {
        name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]
    }


def taken(block: Block, rows: np.ndarray) -> Block:
    """Those rows of a block, in that order: `take` is five times as fast as an index
    where rows hold several values.
    """
    return {name: np.take(column, rows, axis=0) for name, column in block.items()}


def whole_sequences(pieces: Iterable[Block]) -> Iterator[Block]:
    """Cut and join pieces so that each is one sequence; sequences begin in the order of
    their numbers.

    Raises:
        ApartError: a sequence goes on behind another one.
    """
    held: list[Block] = []
    for piece in pieces:
        seq = piece["seq"]
        if not len(seq):
            continue
        step = np.diff(seq)
        if (step < 0).any() or (held and seq[0] < held[0]["seq"][0]):
            raise ApartError
        edges = [0, *(np.flatnonzero(step) + 1).tolist(), len(seq)]
        for start, stop in pairwise(edges):
            if held and held[0]["seq"][0] != seq[start]:
                yield joined(held)
                held = []
            held.append({name: column[start:stop] for name, column in piece.items()})
    if held:
        yield joined(held)


def _sorted(block: Block) -> Block:
    """Rows by the keys; as they are where they are in order."""
    keys = [block[name] for name in KEYS if name in block]
    later = np.zeros(max(len(keys[0]) - 1, 0), bool)
    for key in reversed(keys):
        later = (key[1:] > key[:-1]) | ((key[1:] == key[:-1]) & later)
    if later.all():
        return block
    order = np.lexsort(keys[::-1])
    return taken(block, order)


# -- rows that do not fit into memory --------------------------------------------------


def _external(
    pieces: Iterable[Block],
    like: Block,
    beside: Path,
    progress: Callable[[int], None] | None,
) -> Iterator[Block]:
    """Rows by the keys, in pieces: DuckDB sorts the keys with all other columns of a
    row packed into bytes.
    """
    import duckdb  # noqa: PLC0415 - a tenth of a second that only large interleaved files pay

    keys = [name for name in KEYS if name in like]
    packed = _Packing(like, keys)
    failed: list[BaseException] = []
    reader = pa.RecordBatchReader.from_batches(
        packed.schema, _batches(pieces, packed, failed, progress)
    )
    beside.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{beside.name}.", suffix=".sorting", dir=beside.parent
    ) as folder:
        settings = {
            "memory_limit": MEMORY_LIMIT,
            "temp_directory": folder,
            "threads": 1,
            "preserve_insertion_order": False,
        }
        with duckdb.connect(config=settings) as connection:  # type: ignore[arg-type]
            # It would go to standard output, among our answers.
            connection.execute("SET enable_progress_bar = false")
            try:
                ordered = connection.from_arrow(reader).order(", ".join(keys))
                for batch in ordered.to_arrow_reader(BATCH_ROWS):
                    yield packed.unpacked(batch)
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                if failed:
                    raise failed[0] from None
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise TraceError(
                    f"{beside}: sorting: expected room for the rows in files beside it,"
                    f" found: {reason}; write the trace to a disk with more free space"
                ) from None


def _batches(
    pieces: Iterable[Block],
    packed: _Packing,
    failed: list[BaseException],
    progress: Callable[[int], None] | None,
) -> Iterator[pa.RecordBatch]:
    """Packed rows; what goes wrong is kept, because DuckDB would only pass on its
    text.
    """
    rows = 0
    try:
        for piece in pieces:
            yield packed.packed(piece)
            rows += len(piece["seq"])
            if progress is not None:
                progress(rows)
    except BaseException as error:
        failed.append(error)
        raise


class _Packing:
    """All columns of a row but the keys as W words of 64 bits, which DuckDB moves
    faster than lists or bytes.
    """

    def __init__(self, like: Block, keys: list[str]) -> None:
        self.keys = {
            name: np.dtype(np.int64 if name == "rank" else np.int32) for name in keys
        }
        fields = [
            (name, column.dtype, column.shape[1:])
            for name, column in like.items()
            if name not in keys
        ]
        bytes_ = np.dtype(fields).itemsize
        self.words = -(-bytes_ // 8)
        self.row = np.dtype(
            [*fields, ("", "V1", (8 * self.words - bytes_,))] if bytes_ % 8 else fields
        )
        types = [
            (name, pa.from_numpy_dtype(dtype)) for name, dtype in self.keys.items()
        ]
        self.schema = pa.schema(
            [*types, *((f"word{word}", pa.int64()) for word in range(self.words))]
        )
        self.names = [name for name, *_ in fields]

    def packed(self, piece: Block) -> pa.RecordBatch:
        """One piece for DuckDB."""
        rows = np.zeros(len(piece["seq"]), self.row)
        for name in self.names:
            rows[name] = piece[name]
        words = rows.view(np.int64).reshape(-1, self.words) if self.words else rows
        columns = [
            numbers(piece[name].astype(dtype)) for name, dtype in self.keys.items()
        ]
        columns += [numbers(words[:, word]) for word in range(self.words)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def unpacked(self, batch: pa.RecordBatch) -> Block:
        """Undo `packed`."""
        block = {name: values(batch.column(name)) for name in self.keys}
        words = np.empty((batch.num_rows, self.words), np.int64)
        for word in range(self.words):
            words[:, word] = values(batch.column(f"word{word}"))
        rows = words.view(self.row).reshape(-1) if self.words else words
        return block | {name: np.ascontiguousarray(rows[name]) for name in self.names}

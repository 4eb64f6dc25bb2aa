"""Rows in any order become whole sequences, one behind the other, each sorted by pos
and layer.

Most files keep a sequence together, and then one sequence at a time is sorted in
memory. A file whose sequences are interleaved is read again: a small one is sorted in
memory, a large one by DuckDB, which spills what exceeds its share of memory into a
folder beside the trace that is being made. So memory is bounded by the longest
sequence, not by the file.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from moesim.base.errors import TraceError
from moesim.base.files import ScratchFolder
from moesim.base.inputs import MOST_BYTES_VARIABLE, MOST_SEQUENCE_BYTES, most_bytes
from moesim.base.units import format_bytes
from moesim.traces.format.parquet import batches_of, numbers, values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    Block = dict[str, np.ndarray]

# Interleaved rows up to here are sorted in memory.
IN_MEMORY_BYTES = 64 << 20
# What DuckDB may hold; the rest lies in files.
MEMORY_LIMIT = "192MB"
BATCH_ROWS = 65_536
# What every row has. Scores are as long as there are experts.
_ROUTING = {"seq", "pos", "layer", "phase", "experts", "expert", "rank", "row"}
# Rows are sorted by these, as far as a file has them; numbers below 2**31, the last two
# below 2**63.
KEYS = ("seq", "pos", "layer", "rank", "row")


class ApartError(Exception):
    """A sequence goes on behind another one: the file has to be read again and sorted
    as a whole.
    """


def grouped(path: Path, pieces: Iterable[Block]) -> Iterator[Block]:
    """Sequence by sequence, each sorted in memory.

    Args:
        path: the file, for errors.
        pieces: its rows, all with the same columns and widths. Sequences are numbered
            by their first row.

    Raises:
        ApartError: a sequence goes on behind another one.
        TraceError: a sequence is too long to be sorted in memory.
    """
    return map(_sorted, whole_sequences(pieces, path))


def interleaved(
    path: Path,
    pieces: Iterable[Block],
    beside: Path,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Block]:
    """The same of rows in any order.

    Args:
        path: the file, for errors.
        pieces: as in `grouped`.
        beside: the file to be made; a folder for what does not fit into memory appears
            beside it meanwhile.
        progress: called with the number of rows read so far, where they are many.

    Raises:
        TraceError: a sequence that is too long, or no room for the folder.
    """
    pieces = iter(pieces)
    pending: list[Block] = []
    size = 0
    for piece in pieces:
        pending.append(piece)
        size += sum(column.nbytes for column in piece.values())
        if size > IN_MEMORY_BYTES:
            rows = _external(chain(pending, pieces), piece, beside, progress)
            # The chain holds them now, and lets them go one by one.
            del pending
            yield from whole_sequences(rows, path)
            return
    if pending:
        yield from whole_sequences([_sorted(joined(pending))], path)


def joined(pieces: list[Block]) -> Block:
    """Return pieces with the same columns as one block."""
    if len(pieces) == 1:
        return pieces[0]

    return {
        name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]
    }


def taken(block: Block, rows: np.ndarray) -> Block:
    """Return those rows of a block, in that order."""
    # Five times as fast as an index where rows hold several values.
    return {name: np.take(column, rows, axis=0) for name, column in block.items()}


def whole_sequences(
    pieces: Iterable[Block], path: Path | None = None
) -> Iterator[Block]:
    """Cut and join pieces so that each is one sequence; sequences begin in the order of
    their numbers.

    Args:
        pieces: rows of sequences.
        path: the file, where sequences must not be too long to be held in memory,
            their scores left aside.

    Raises:
        ApartError: a sequence goes on behind another one.
        TraceError: a sequence is too long.
    """
    most = max(MOST_SEQUENCE_BYTES, most_bytes())
    pending: list[Block] = []
    for piece in pieces:
        seq = piece["seq"]
        if not len(seq):
            continue

        step = np.diff(seq)
        falls = pending and seq[0] < pending[0]["seq"][0]
        if falls or (step < 0).any():
            raise ApartError

        edges = [0, *(np.flatnonzero(step) + 1).tolist(), len(seq)]
        for start, stop in pairwise(edges):
            if pending and pending[0]["seq"][0] != seq[start]:
                yield joined(pending)
                pending = []
            pending.append({name: column[start:stop] for name, column in piece.items()})
        if path is not None and sum(map(_routing_bytes, pending)) > most:
            raise TraceError(
                f"{path}: sequence {seq[-1]}: expected rows of at most"
                f" {format_bytes(most)}, found more; is a column for the sequence"
                f" missing? {MOST_BYTES_VARIABLE} raises the limit"
            )

    if pending:
        yield joined(pending)


def _routing_bytes(block: Block) -> int:
    return sum(block[name].nbytes for name in _ROUTING & block.keys())


def _sorted(block: Block) -> Block:
    """Rows by the keys; as they are where they are in order."""
    keys = [block[name] for name in KEYS if name in block]

    # From the last key to the first: a row is later if a key is, or if that key is
    # equal and the ones behind it are later.
    ascends = np.zeros(max(len(keys[0]) - 1, 0), bool)
    for key in reversed(keys):
        equal = key[1:] == key[:-1]
        ascends = (key[1:] > key[:-1]) | (equal & ascends)
    if ascends.all():
        return block

    # lexsort takes the most significant key last.
    return taken(block, np.lexsort(keys[::-1]))


# -- rows that do not fit into memory --------------------------------------------------


def _external(
    pieces: Iterable[Block],
    like: Block,
    beside: Path,
    progress: Callable[[int], None] | None,
) -> Iterator[Block]:
    """Rows by the keys, in pieces: DuckDB sorts the keys with all other columns of a
    row packed into one value.
    """
    import duckdb  # noqa: PLC0415 - a tenth of a second that only large interleaved files pay

    keys = [name for name in KEYS if name in like]
    packing = _RowPacking(like, keys)
    errors: list[BaseException] = []
    packed = _packed_batches(pieces, packing, errors, progress)
    reader = pa.RecordBatchReader.from_batches(packing.schema, packed)

    beside.parent.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(beside.parent) as folder:
        settings = {
            "memory_limit": MEMORY_LIMIT,
            "temp_directory": str(folder),
            "threads": 1,
            "preserve_insertion_order": False,
        }
        with duckdb.connect(config=settings) as connection:  # type: ignore[arg-type]
            # It would go to standard output, among our answers.
            connection.execute("SET enable_progress_bar = false")
            try:
                ordered = connection.from_arrow(reader).order(", ".join(keys))
                for batch in batches_of(ordered, BATCH_ROWS):
                    yield packing.unpacked(batch)
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                if errors:  # reading the file failed, not sorting
                    raise errors[0] from None

                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise TraceError(
                    f"{beside}: sorting: expected room for the rows in files beside it,"
                    f" found: {reason}; write the trace to a disk with more free space"
                ) from None


def _packed_batches(
    pieces: Iterable[Block],
    packing: _RowPacking,
    errors: list[BaseException],
    progress: Callable[[int], None] | None,
) -> Iterator[pa.RecordBatch]:
    """Packed rows; what goes wrong is kept in `errors`, because DuckDB would only pass
    on its text.
    """
    rows = 0
    try:
        for piece in pieces:
            yield packing.packed(piece)
            rows += len(piece["seq"])
            if progress is not None:
                progress(rows)
    except BaseException as error:
        errors.append(error)
        raise


class _RowPacking:
    """All columns of a row but the keys as one value of its bytes."""

    def __init__(self, like: Block, keys: list[str]) -> None:
        self._names = [name for name in like if name not in keys]
        self._row = np.dtype(
            [(name, like[name].dtype, like[name].shape[1:]) for name in self._names]
        )
        self._keys = {
            name: np.dtype(np.int64 if name in ("rank", "row") else np.int32)
            for name in keys
        }
        fields = [
            (name, pa.from_numpy_dtype(dtype)) for name, dtype in self._keys.items()
        ]
        self.schema = pa.schema([*fields, ("rows", pa.binary(self._row.itemsize))])

    def packed(self, piece: Block) -> pa.RecordBatch:
        """Return one piece for DuckDB."""
        rows = np.empty(len(piece["seq"]), self._row)
        for name in self._names:
            rows[name] = piece[name]
        keys = [
            numbers(piece[name].astype(dtype)) for name, dtype in self._keys.items()
        ]
        kind = self.schema.field("rows").type
        values_of_rows = pa.Array.from_buffers(
            kind, len(rows), [None, pa.py_buffer(rows)]
        )
        return pa.RecordBatch.from_arrays([*keys, values_of_rows], schema=self.schema)

    def unpacked(self, batch: pa.RecordBatch) -> Block:
        """Undo `packed`."""
        block = {name: values(batch.column(name)) for name in self._keys}
        data = batch.column("rows").cast(self.schema.field("rows").type).buffers()[1]
        rows = np.frombuffer(data, self._row, batch.num_rows)
        for name in self._names:
            block[name] = np.ascontiguousarray(rows[name])
        return block

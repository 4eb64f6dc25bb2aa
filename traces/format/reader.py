"""A trace is read like a tape: forward, one sequence at a time, and only the columns
somebody asked for.

Everything a replay relies on is checked while it streams past, so a damaged file is
named by file, row and column instead of surfacing later as a wrong number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from moesim.traces.errors import TraceError
from moesim.traces.files import sha256
from moesim.traces.format.arrow import codes, flat, values
from moesim.traces.format.checks import check_sequence
from moesim.traces.format.distinct import first_repeat
from moesim.traces.format.schema import (
    METADATA_KEY,
    OPTIONAL_COLUMNS,
    REQUIRED_COLUMNS,
    ModelShape,
    Phase,
    TraceHeader,
)
from moesim.traces.format.sorting import joined
from moesim.traces.format.writer import ROW_GROUP_BYTES, ROW_GROUP_ROWS, column_width
from moesim.traces.shipped import SHIPPED, resolve_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_DTYPES = {
    "seq": np.int32,
    "pos": np.int32,
    "layer": np.int16,
    "token": np.int32,
    "experts": np.uint16,
}
_RENEW = "record or import it again"
_SORT = "sort them: `moesim trace import"
_AGAIN = f"was it cut off while copying? {_RENEW}"


@dataclass(slots=True)
class SequenceRows:
    """All rows of one sequence, sorted by pos, layer. N rows, K experts per token, E
    experts per layer.

    Attributes:
        seq: sequence id.
        pos: int32 [N].
        phase: int8 [N], codes of `Phase`.
        layer: int16 [N].
        experts: uint16 [N, K], best first.
        columns: the optional columns asked for: float16 [N, K] or [N, E]; ``token``
            int32 [N].
    """

    seq: int
    pos: np.ndarray
    phase: np.ndarray
    layer: np.ndarray
    experts: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)


class Trace:
    """An opened trace: its header is read and its columns are checked, its rows are not
    read yet.

    Attributes:
        path: of the file.
        name: what it was opened by: its path, or the name of a trace that ships.
    """

    def __init__(
        self, path: Path, file: pq.ParquetFile, header: TraceHeader, name: str = ""
    ) -> None:
        self.path = path
        # Results hold the name, so that they are the same wherever moesim is installed.
        self.name = name or str(path)
        self.header = header
        self.shape: ModelShape = header.shape
        self.columns: frozenset[str] = frozenset(OPTIONAL_COLUMNS) & frozenset(
            file.schema_arrow.names
        )
        self.rows: int = file.metadata.num_rows
        self.size_bytes: int = path.stat().st_size

    def __repr__(self) -> str:
        """Say which file, which model and how many rows."""
        return f"Trace({str(self.path)!r}, {self.shape.name}, {self.rows} rows)"

    def digest(self) -> str:
        """sha256 of the file, in hexadecimal."""
        return sha256(self.path)

    def require(self, columns: Iterable[str], who: str) -> None:
        """Check that the optional `columns` are present.

        Raises:
            TraceError: naming `who` needs which column.
        """
        for name in columns:
            if name not in self.columns:
                has = ", ".join(sorted(self.columns)) or "no optional column"
                raise TraceError(
                    f"{self.path}: {who} needs column {name!r}, this trace has {has};"
                    " record a trace with it, or choose a policy that does not need it"
                )

    def sequences(self, columns: Iterable[str] = ()) -> Iterator[SequenceRows]:
        """Stream the trace, one whole sequence at a time, holding little more than that
        sequence.

        Args:
            columns: optional columns to read; all others are never touched.

        Raises:
            TraceError: a column is missing, or the rows break a promise of the format.
        """
        wanted = tuple(dict.fromkeys(columns))
        self.require(wanted, "this replay")
        pieces: list[dict[str, np.ndarray]] = []
        first = 0
        for base, block in self._blocks(wanted):
            seq = block["seq"]
            edges = [0, *(np.flatnonzero(np.diff(seq)) + 1).tolist(), len(seq)]
            for start, stop in pairwise(edges):
                if pieces and pieces[0]["seq"][0] != seq[start]:
                    yield self._sequence(pieces, first)
                    pieces = []
                if not pieces:
                    first = base + start
                pieces.append(
                    {name: values[start:stop] for name, values in block.items()}
                )
        yield self._sequence(pieces, first)

    def _blocks(
        self, wanted: tuple[str, ...]
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Checked blocks of rows as (number of the first row, name -> array)."""
        names = [*REQUIRED_COLUMNS, *wanted]
        row_bytes = sum(2 * max(column_width(name, self.header), 1) for name in names)
        rows = max(1024, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES // row_bytes))
        base = 0
        last = (-1, -1)
        with _parquet(self.path) as file:
            batches = file.iter_batches(rows, columns=names, use_threads=False)
            while True:
                try:
                    batch = next(batches, None)
                except (pa.ArrowException, OSError) as error:
                    reason = _first_line(error)
                    raise TraceError(
                        f"{self.path}: after row {base}: {reason}; {_AGAIN}"
                    ) from None
                if batch is None:
                    return
                if batch.num_rows:
                    block = {
                        name: self._column(name, batch.column(name), base)
                        for name in names
                    }
                    last = self._check_order(block, base, last)
                    yield base, block
                    base += batch.num_rows

    def _bad(
        self, row: int, column: str, expected: str, got: object, way_out: str = _RENEW
    ) -> TraceError:
        return TraceError(
            f"{self.path}: row {row}: {column}: expected {expected}, got {got};"
            f" {way_out}"
        )

    def _column(self, name: str, array: Any, base: int) -> np.ndarray:
        """One column of a block as numpy, with its values checked."""
        if array.null_count:
            row = base + int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
            raise self._bad(row, name, "a value", "null")
        if name == "phase":
            return self._phases(array, base)
        width = column_width(name, self.header)
        if not width:
            scalars = values(array)
            if name == "layer":
                self._check_range(name, scalars.reshape(-1, 1), self.shape.layers, base)
            return scalars.astype(_DTYPES[name])
        matrix = self._matrix(name, array, width, base)
        if name == "experts":
            self._check_range(name, matrix, self.shape.experts, base)
            matrix = np.ascontiguousarray(matrix, np.uint16)
            if (row := first_repeat(matrix)) >= 0:
                raise self._bad(base + row, name, "distinct ids", matrix[row].tolist())
            return matrix
        with np.errstate(over="ignore"):
            half = matrix.astype(np.float16)
        if not (finite := np.isfinite(half)).all():
            row, place = divmod(int(np.argmin(finite.reshape(-1))), width)
            raise self._bad(
                base + row, f"{name}[{place}]", "a finite number", matrix[row, place]
            )
        return half

    def _phases(self, array: Any, base: int) -> np.ndarray:
        phases = codes(array, [phase.label for phase in Phase])
        if (phases < 0).any():
            row = int(np.argmax(phases < 0))
            raise self._bad(
                base + row, "phase", "'prefill' or 'decode'", repr(array[row].as_py())
            )
        return phases

    def _matrix(self, name: str, array: Any, width: int, base: int) -> np.ndarray:
        """[N, width] of a list column, without visiting rows one by one."""
        lengths = np.diff(values(array.offsets))
        if (lengths != width).any():
            row = int(np.argmax(lengths != width))
            what = (
                "top-k of the header"
                if name in ("experts", "weights")
                else "experts of the header"
            )
            raise self._bad(
                base + row, name, f"{width} values ({what})", int(lengths[row])
            )
        inner = flat(array)
        if inner.null_count:
            row = (
                int(np.argmax(inner.is_null().to_numpy(zero_copy_only=False))) // width
            )
            raise self._bad(base + row, name, "values", "null")
        return values(inner).reshape(-1, width)

    def _check_range(
        self, name: str, matrix: np.ndarray, limit: int, base: int
    ) -> None:
        if matrix.size and not (matrix.min() >= 0 and matrix.max() < limit):
            outside = (matrix < 0) | (matrix >= limit)
            row, place = divmod(int(np.argmax(outside.reshape(-1))), matrix.shape[1])
            fit = "does the header's shape fit this trace?"
            raise self._bad(
                base + row, name, f"0..{limit - 1}", matrix[row, place], fit
            )

    def _check_order(
        self, block: dict[str, np.ndarray], base: int, last: tuple[int, int]
    ) -> tuple[int, int]:
        layers = self.shape.layers
        seq = np.concatenate(([last[0]], block["seq"]))
        place = np.concatenate(
            ([last[1]], block["pos"].astype(np.int64) * layers + block["layer"])
        )
        step = np.diff(seq)
        later = (step > 0) | ((step == 0) & (np.diff(place) > 0))
        if not later.all():
            row = int(np.argmin(later))
            here = (
                f"seq {block['seq'][row]} pos {block['pos'][row]} layer"
                f" {block['layer'][row]}"
            )
            before = (
                f"seq {seq[row]} pos {place[row] // layers} layer {place[row] % layers}"
            )
            got = f"{here} after {before}"
            raise self._bad(
                base + row,
                "order",
                "rows by seq, pos, layer",
                got,
                f"{_SORT} {self.path} SORTED`",
            )
        return int(seq[-1]), int(place[-1])

    def _sequence(
        self, pieces: list[dict[str, np.ndarray]], first: int
    ) -> SequenceRows:
        """Join the pieces of one sequence and check that its steps are whole."""
        rows = joined(pieces)
        phase = rows["phase"]
        layer = rows["layer"]
        pos = rows["pos"]
        check_sequence(
            pos,
            phase,
            layer,
            self.shape.layers,
            lambda row, *what: self._bad(first + row, *what),
        )
        optional = {name: rows[name] for name in rows if name not in REQUIRED_COLUMNS}
        return SequenceRows(
            int(rows["seq"][0]), pos, phase, layer, rows["experts"], optional
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _parquet(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path, pre_buffer=False)
        _ = file.schema_arrow.names  # damaged names show here
    except FileNotFoundError:
        way_out = (
            "`moesim record` or `moesim trace import` makes a trace;"
            f" {' and '.join(SHIPPED)} ship with moesim"
        )
        raise TraceError(f"{path}: no such file; {way_out}") from None
    except IsADirectoryError:
        raise TraceError(f"{path}: expected a Parquet file, found a folder") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}: not a readable Parquet file: {_first_line(error)}; {_AGAIN}"
        ) from None
    return file


def _check_schema(path: Path, schema: pa.Schema) -> None:
    """Refuse missing columns and wrong kinds; other widths of numbers are converted
    while reading.
    """
    if missing := [name for name in REQUIRED_COLUMNS if name not in schema.names]:
        raise TraceError(
            f"{path}: column {missing[0]!r} is missing, found"
            f" {', '.join(schema.names)}; `moesim trace import` converts foreign"
            " layouts"
        )
    for name in schema.names:
        if name not in (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS):
            continue
        found = schema.field(name).type
        inner = (
            found.value_type
            if pa.types.is_list(found) or pa.types.is_dictionary(found)
            else found
        )
        if name == "phase":
            good = pa.types.is_string(inner)
            expected = "dictionary of strings"
        elif name in ("seq", "pos", "layer", "token"):
            good = pa.types.is_integer(found)
            expected = "integers"
        elif name == "experts":
            good = pa.types.is_list(found) and pa.types.is_integer(inner)
            expected = "list<uint16>"
        else:
            good = pa.types.is_list(found) and pa.types.is_floating(inner)
            expected = "list<float16>"
        if not good:
            raise TraceError(
                f"{path}: column {name!r}: expected {expected}, found {found}; import"
                " it again"
            )


def open_trace(path: Path | str) -> Trace:
    """Open a trace and check all that can be known without reading rows.

    Args:
        path: of the file, or the name of a trace that ships (`SHIPPED`).

    Raises:
        TraceError: no such file, not Parquet, cut off, foreign, no header, another
            schema version, or empty.
    """
    name = str(path)
    path = resolve_trace(path)
    if path.is_dir():
        raise TraceError(f"{path}: expected a Parquet file, found a folder")
    with _parquet(path) as file:
        metadata = file.schema_arrow.metadata or {}
        if METADATA_KEY not in metadata:
            raise TraceError(
                f"{path}: expected the header 'moesim' in the Parquet metadata, found"
                " none; `moesim trace import` makes a trace of a foreign file"
            )
        header = TraceHeader.from_json(metadata[METADATA_KEY], where=str(path))
        _check_schema(path, file.schema_arrow)
        if not file.metadata.num_rows:
            raise TraceError(
                f"{path}: expected at least one row, found an empty trace; {_AGAIN}"
            )
        return Trace(path, file, header, name)

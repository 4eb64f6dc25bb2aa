"""Reads traces: forward, one sequence at a time, and only the columns asked for.

Everything a replay relies on is checked while it streams past, so a damaged file is
named by file, row and column instead of surfacing later as a wrong number.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from moesim.base.errors import MissingColumnError, TraceError
from moesim.base.inputs import check_file_name
from moesim.base.seals import check_seal
from moesim.traces.format.arrays import first_repeat
from moesim.traces.format.parquet import codes, flat, open_parquet, values
from moesim.traces.format.schema import (
    METADATA_KEY,
    OPTIONAL_COLUMNS,
    REQUIRED_COLUMNS,
    ModelShape,
    Phase,
    TraceHeader,
    check_sequence,
)
from moesim.traces.format.sorting import follow, joined
from moesim.traces.format.writer import ROW_GROUP_BYTES, ROW_GROUP_ROWS, column_width
from moesim.traces.passes import Passes
from moesim.traces.shipped import no_trace, resolve_trace

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    import pyarrow.parquet as pq

# Other writers may have used wider numbers; every part of moesim counts on these.
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

    def arrays(self) -> dict[str, Any]:
        """All of it by name, as `moesim.traces.format.writer.TraceWriter.write` takes
        it.
        """
        return {
            "seq": self.seq,
            "pos": self.pos,
            "phase": self.phase,
            "layer": self.layer,
            "experts": self.experts,
            **self.columns,
        }


class Trace:
    """An opened trace: its header is read and its columns are checked, its rows are not
    read yet.

    Attributes:
        path: of the file.
        name: what it was opened by: its path, or the name of a trace that ships.
        passes: what the forward passes hold that are composed of it.
        last_cut: how it was cut last, and the blocks of that: for whoever replays the
            same trace again; shared with what `cut` returns.
    """

    def __init__(
        self,
        path: Path,
        file: pq.ParquetFile,
        header: TraceHeader,
        name: str = "",
    ) -> None:
        self.path = path
        self._digest: str | None = None
        # Results hold the name, so that they are the same wherever moesim is installed.
        self.name = name or str(path)
        self.passes = Passes()
        self.last_cut: dict[Hashable, list[Any]] = {}
        self.header = header
        self.shape: ModelShape = header.shape
        self.columns: frozenset[str] = frozenset(OPTIONAL_COLUMNS) & frozenset(
            file.schema_arrow.names
        )
        self.rows: int = file.metadata.num_rows
        # For reports: how much was read from disk says more than the number of rows.
        self.size_bytes: int = path.stat().st_size

    def __repr__(self) -> str:
        """Say which file, which model and how many rows."""
        return f"Trace({str(self.path)!r}, {self.shape.name}, {self.rows} rows)"

    def cut(self, passes: Passes) -> Trace:
        """The same trace, whose forward passes hold something else."""
        other = copy(self)
        other.passes = passes
        other.last_cut = self.last_cut
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what another process can cut for itself."""
        return {**vars(self), "last_cut": {}}

    def digest(self) -> str:
        """sha256 of the file, in hexadecimal.

        Raises:
            TraceError: the file does not match its seal.
        """
        if self._digest is None:
            self._digest = check_seal(self.path)
        return self._digest

    def require(self, columns: Iterable[str], user: str) -> None:
        """Check that the optional `columns` are present.

        Raises:
            TraceError: naming `user`, who needs the column.
        """
        for name in columns:
            if name not in self.columns:
                has = ", ".join(sorted(self.columns)) or "no optional column"
                raise MissingColumnError(
                    f"{self.path}: {user} needs column {name!r}, this trace has {has};"
                    " record a trace with it, add synthetic ones with `moesim trace"
                    " predict`, or choose a policy that does not need it",
                    column=name,
                )

    def sequences(self, columns: Iterable[str] = ()) -> Iterator[SequenceRows]:
        """Stream the trace, one whole sequence at a time, holding little more than that
        sequence.

        Args:
            columns: optional columns to read; all others are never touched.

        Raises:
            TraceError: a column is missing, or the rows break a promise of the format.
        """
        # Two policies may ask for one column; it is read once.
        optional = tuple(dict.fromkeys(columns))
        self.require(optional, "this replay")
        self.digest()

        # A sequence may reach over several blocks, and a block may hold several.
        pieces: list[dict[str, np.ndarray]] = []
        first_row = 0
        for base, block in self._blocks(optional):
            seq = block["seq"]
            edges = [0, *(np.flatnonzero(np.diff(seq)) + 1).tolist(), len(seq)]
            for start, stop in pairwise(edges):
                if pieces and pieces[0]["seq"][0] != seq[start]:
                    yield self._sequence(pieces, first_row)
                    pieces = []
                if not pieces:
                    first_row = base + start
                pieces.append(
                    {name: values[start:stop] for name, values in block.items()}
                )

        yield self._sequence(pieces, first_row)

    def _blocks(
        self, optional: tuple[str, ...]
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Checked blocks of rows as (number of the first row, name -> array)."""
        names = [*REQUIRED_COLUMNS, *optional]
        # As the writer sizes its row groups; files of other writers have larger ones.
        row_bytes = sum(2 * max(column_width(name, self.header), 1) for name in names)
        rows = max(1024, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES // row_bytes))

        base = 0
        last = (-1, -1)
        with _parquet(self.path) as file:
            # One thread: a replay keeps the other cores for what it times.
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
                if not batch.num_rows:
                    continue

                block = {
                    name: self._column(name, batch.column(name), base) for name in names
                }
                last = self._check_order(block, base, last)
                yield base, block
                base += batch.num_rows

    def _error(
        self, row: int, column: str, expected: str, got: object, way_out: str = _RENEW
    ) -> TraceError:
        place = f"{self.path}: row {row}: {column}"
        return TraceError(f"{place}: expected {expected}, got {got}; {way_out}")

    def _column(self, name: str, array: Any, base: int) -> np.ndarray:
        """One column of a block as numpy, with its values checked."""
        if array.null_count:
            raise self._error(base + _first_null(array), name, "a value", "null")
        if name == "phase":
            return self._phases(array, base)

        width = column_width(name, self.header)
        if not width:
            return self._scalars(name, array, base)

        matrix = self._matrix(name, array, width, base)
        if name == "experts":
            return self._expert_ids(matrix, base)
        return self._finite(name, matrix, base)

    def _scalars(self, name: str, array: Any, base: int) -> np.ndarray:
        """[N] of one number per row."""
        scalars = values(array)
        if name == "layer":
            self._check_range(name, scalars.reshape(-1, 1), self.shape.layers, base)

        return scalars.astype(_DTYPES[name])

    def _phases(self, array: Any, base: int) -> np.ndarray:
        phases = codes(array, [phase.label for phase in Phase])
        if (phases < 0).any():
            row = int(np.argmax(phases < 0))
            actual = repr(array[row].as_py())
            raise self._error(base + row, "phase", "'prefill' or 'decode'", actual)

        return phases

    def _expert_ids(self, matrix: np.ndarray, base: int) -> np.ndarray:
        """uint16 [N, K], in range and distinct."""
        self._check_range("experts", matrix, self.shape.experts, base)
        ids = np.ascontiguousarray(matrix, np.uint16)

        row = first_repeat(ids)
        if row >= 0:
            actual = ids[row].tolist()
            raise self._error(base + row, "experts", "distinct ids", actual)
        return ids

    def _finite(self, name: str, matrix: np.ndarray, base: int) -> np.ndarray:
        """float16 [N, width], without infinity and without what is no number."""
        # A number too large for 16 bits becomes infinity, which is found below.
        with np.errstate(over="ignore"):
            rounded = matrix.astype(np.float16)

        finite = np.isfinite(rounded)
        if not finite.all():
            width = matrix.shape[1]
            row, place = divmod(int(np.argmin(finite.reshape(-1))), width)
            actual = matrix[row, place]
            column = f"{name}[{place}]"
            raise self._error(base + row, column, "a finite number", actual)

        # Every gate combines experts by shares; a score may well be negative.
        if name == "weights" and rounded.size and rounded.min() < 0:
            width = matrix.shape[1]
            row, place = divmod(int(np.argmin(rounded.reshape(-1))), width)
            column = f"{name}[{place}]"
            actual = matrix[row, place]
            raise self._error(base + row, column, "a number >= 0", actual)
        return rounded

    def _matrix(self, name: str, array: Any, width: int, base: int) -> np.ndarray:
        """[N, width] of a list column, without visiting rows one by one."""
        # Offsets tell the length of every list without a look at its values.
        lengths = np.diff(values(array.offsets))
        if (lengths != width).any():
            row = int(np.argmax(lengths != width))
            is_choice = name in ("experts", "weights")
            source = "top-k of the header" if is_choice else "experts of the header"
            expected = f"{width} values ({source})"
            raise self._error(base + row, name, expected, int(lengths[row]))

        inner = flat(array)
        if inner.null_count:
            row = _first_null(inner) // width
            raise self._error(base + row, name, "values", "null")
        return values(inner).reshape(-1, width)

    def _check_range(
        self, name: str, matrix: np.ndarray, limit: int, base: int
    ) -> None:
        if not matrix.size or (matrix.min() >= 0 and matrix.max() < limit):
            return

        outside = (matrix < 0) | (matrix >= limit)
        row, place = divmod(int(np.argmax(outside.reshape(-1))), matrix.shape[1])
        actual = matrix[row, place]
        way_out = "does the header's shape fit this trace?"
        raise self._error(base + row, name, f"0..{limit - 1}", actual, way_out)

    def _check_order(
        self, block: dict[str, np.ndarray], base: int, last: tuple[int, int]
    ) -> tuple[int, int]:
        """Check that rows ascend from `last`, the sequence and place before them;
        return those of the last row.
        """
        layers = self.shape.layers
        seq, place, row = follow(last, block, layers)
        if row is not None:
            this = _place(seq[row + 1], place[row + 1], layers)
            before = _place(seq[row], place[row], layers)
            raise self._error(
                base + row,
                "order",
                "rows by seq, pos, layer",
                f"{this} after {before}",
                f"{_SORT} {self.path} SORTED`",
            )

        return int(seq[-1]), int(place[-1])

    def _sequence(
        self, pieces: list[dict[str, np.ndarray]], first_row: int
    ) -> SequenceRows:
        """Join the pieces of one sequence and check that its steps are whole."""
        rows = joined(pieces)

        def error(row: int, *parts: Any) -> TraceError:
            return self._error(first_row + row, *parts)

        check_sequence(
            rows["pos"], rows["phase"], rows["layer"], self.shape.layers, error
        )
        optional = {name: rows[name] for name in rows if name not in REQUIRED_COLUMNS}
        return SequenceRows(
            seq=int(rows["seq"][0]),
            pos=rows["pos"],
            phase=rows["phase"],
            layer=rows["layer"],
            experts=rows["experts"],
            columns=optional,
        )


def _place(seq: int, place: int, layers: int) -> str:
    return f"seq {seq} pos {place // layers} layer {place % layers}"


def _first_null(array: Any) -> int:
    return int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


@contextmanager
def _parquet(path: Path) -> Iterator[pq.ParquetFile]:
    with ExitStack() as stack:
        yield _opened(path, stack)


def _opened(path: Path, stack: ExitStack) -> pq.ParquetFile:
    try:
        file = stack.enter_context(open_parquet(path))
        _ = file.schema_arrow.names  # damaged names show here
    except FileNotFoundError:
        raise no_trace(path) from None
    except IsADirectoryError:
        raise TraceError(f"{path}: expected a Parquet file, found a folder") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if path.suffix == ".gguf":
            raise TraceError(
                f"{path}: a model, and no trace; `moesim advise` and `moesim model`"
                " read it, `moesim trace import` makes a trace of what its engine wrote"
            ) from None
        raise TraceError(
            f"{path}: not a readable Parquet file: {_first_line(error)}; {_AGAIN}"
        ) from None

    return file


def _check_schema(path: Path, schema: pa.Schema) -> None:
    """Refuse missing columns and wrong kinds; other widths of numbers are converted
    while reading.
    """
    missing = [name for name in REQUIRED_COLUMNS if name not in schema.names]
    if missing:
        raise TraceError(
            f"{path}: column {missing[0]!r} is missing, found"
            f" {', '.join(schema.names)}; `moesim trace import` converts foreign"
            " layouts"
        )

    for name in schema.names:
        if name not in (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS):
            continue
        kind = schema.field(name).type
        fits, expected = _fits(name, kind)
        if not fits:
            raise TraceError(
                f"{path}: column {name!r}: expected {expected}, found {kind}; import"
                " it again"
            )


def _fits(name: str, kind: pa.DataType) -> tuple[bool, str]:
    """Tell whether a column may have this type, and the type it should have."""
    # Widths are converted while reading, kinds are not: floats are no ids.
    is_list = pa.types.is_list(kind)
    inner = kind.value_type if is_list or pa.types.is_dictionary(kind) else kind

    if name == "phase":
        return pa.types.is_string(inner), "dictionary of strings"
    if name in ("seq", "pos", "layer", "token"):
        return pa.types.is_integer(kind), "integers"
    if name == "experts":
        return is_list and pa.types.is_integer(inner), "list<uint16>"
    return is_list and pa.types.is_floating(inner), "list<float16>"


def open_trace(path: Path | str) -> Trace:
    """Open a trace and check all that can be known without reading rows.

    Args:
        path: of the file, or the name of a trace that ships (`SHIPPED`).

    Raises:
        TraceError: no such file, not Parquet, cut off, foreign, no header, another
            schema version, or empty.
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"expected a trace by path or name, got {path!r}")
    name = str(path)
    path = resolve_trace(path)
    check_file_name(path)
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

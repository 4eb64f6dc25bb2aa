"""Writes traces: rows in, a complete Parquet file out, or none.

Rows are checked, gathered and written in row groups small enough that a reader never
needs more than a few tens of MiB at a time.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from moesim.base.errors import TraceError
from moesim.base.files import written_beside
from moesim.traces.format.parquet import lists, named, numbers, sealed_writer
from moesim.traces.format.rows import KINDS, checked_rows
from moesim.traces.format.schema import (
    METADATA_KEY,
    OPTIONAL_COLUMNS,
    REQUIRED_COLUMNS,
    Phase,
    TraceHeader,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

# A reader holds one row group; wide rows (scores of many experts) make it shorter.
ROW_GROUP_ROWS = 65_536
ROW_GROUP_BYTES = 32 << 20
_LEAST_GROUP_ROWS = 1024


def column_width(name: str, header: TraceHeader) -> int:
    """Return values per row: K for experts and weights, E for scores and predictions, 0
    for columns without lists.
    """
    if name in ("experts", "weights"):
        return header.shape.top_k

    return 0 if name in KINDS else header.shape.experts


def arrow_schema(header: TraceHeader, columns: Iterable[str]) -> pa.Schema:
    """Return the Parquet schema of a trace with these optional columns, header
    included.
    """
    types = {name: pa.from_numpy_dtype(kind) for name, kind in KINDS.items()}
    types["phase"] = pa.dictionary(pa.int8(), pa.string())
    types["experts"] = pa.list_(pa.uint16())
    scores = pa.list_(pa.float16())
    names = (*REQUIRED_COLUMNS, *columns)
    fields = [pa.field(name, types.get(name, scores)) for name in names]
    return pa.schema(fields, metadata={METADATA_KEY: header.to_json()})


class TraceWriter:
    """Write one routing trace as a context manager.

    Args:
        path: the file to make; it appears only when the block ends without an
            exception.
        header: shape and provenance.
        columns: optional columns present in every row, any of ``weights``, ``scores``,
            ``pred…``, ``token``.

    Raises:
        TraceError: unknown column names.
    """

    def __init__(
        self, path: Path | str, header: TraceHeader, columns: Iterable[str] = ()
    ) -> None:
        names = set(columns)
        unknown = sorted(names - set(OPTIONAL_COLUMNS))
        if unknown:
            known = ", ".join(OPTIONAL_COLUMNS)
            raise TraceError(
                f"{path}: column {unknown[0]!r} is unknown; known: {known}"
            )

        self.path = Path(path)
        self.header = header
        self.columns = tuple(name for name in OPTIONAL_COLUMNS if name in names)
        self.rows = 0
        self._schema = arrow_schema(header, self.columns)
        widths = {name: column_width(name, header) for name in self._schema.names}

        # 16 bytes of scalars, two of each value of a list.
        fitting = ROW_GROUP_BYTES // (16 + 2 * sum(widths.values()))
        self._group_rows = max(_LEAST_GROUP_ROWS, min(ROW_GROUP_ROWS, fitting))
        # One row group in memory, filled again and again.
        self._group = {
            name: np.empty(
                (self._group_rows, width) if width else self._group_rows,
                KINDS.get(name, np.float16),
            )
            for name, width in widths.items()
        }
        self._filled = 0
        self._last = (-1, -1)

    def __enter__(self) -> Self:
        """Begin the file beside its final name."""
        with ExitStack() as stack:
            part = stack.enter_context(written_beside(self.path))
            parquet = sealed_writer(
                part,
                self._schema,
                compression="zstd",
                use_dictionary=[name for name in KINDS if name != "experts"],
                write_statistics=["seq", "pos", "layer"],
                # Smaller, and faster both ways; 16-bit floats would be, too, but
                # DuckDB reads them plain only.
                column_encoding={"experts.list.element": "BYTE_STREAM_SPLIT"},
            )
            self._parquet = stack.enter_context(parquet)
            stack.push(self._finish)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the file and give it its name, or leave nothing behind."""
        self._stack.__exit__(kind, error, trace)

    def _finish(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        self._flush()
        if not self.rows:
            raise TraceError(
                f"{self.path}: expected at least one row, got none; nothing was written"
            )

    def write(
        self,
        seq: Any,
        pos: Any,
        phase: Any,
        layer: Any,
        experts: np.ndarray,
        **optional: Any,
    ) -> None:
        """Append N rows, sorted by seq, pos, layer, also across calls.

        Args:
            seq: [N] or one number for all rows, as are `pos`, `phase`, `layer` and
                ``token``.
            pos: absolute position in the sequence.
            phase: codes of `Phase`.
            layer: MoE layer.
            experts: [N, K] ids, best first.
            optional: each of `columns`: ``weights`` [N, K] as applied; ``scores``
                [N, E] of the gate before top-k; ``pred1_raw`` [N, E], the gate of layer
                l+1 applied to the gate input of layer l, zeros where no such layer is;
                ``pred2_raw`` and ``pred3_raw`` likewise for layers l+2 and l+3;
                ``pred1_res``, as ``pred1_raw`` with the residual correction; ``token``
                ids. One that is None counts as not given.

        Raises:
            TraceError: a wrong shape, a missing or undeclared column, ids out of range,
                values that are not finite, negative weights, rows out of order.
        """
        # All or none: a column that some rows lack could not be read back.
        present = [name for name, value in optional.items() if value is not None]
        if set(present) != set(self.columns):
            raise self._error(
                0,
                "optional columns",
                ", ".join(self.columns) or "none",
                ", ".join(present) or "none",
                "declare them when opening the writer",
            )
        count = len(experts)
        given = {"seq": seq, "pos": pos, "phase": phase, "layer": layer}
        given |= {"experts": experts} | {name: optional[name] for name in self.columns}
        block = {name: self._column(name, given[name], count) for name in given}
        if count:
            rows, self._last = checked_rows(
                block, self.header.shape, self._last, self._error
            )
            self.rows += count
            self._append(rows, count)

    def _append(self, block: dict[str, np.ndarray], count: int) -> None:
        """Copy checked rows into row groups."""
        start = 0
        while start < count:
            part = min(count - start, self._group_rows - self._filled)
            place = slice(self._filled, self._filled + part)
            for name, values in block.items():
                self._group[name][place] = values[start : start + part]

            start += part
            self._filled += part
            if self._filled == self._group_rows:
                self._flush()

    def _error(
        self, row: int, column: str, expected: str, got: object, way_out: str = ""
    ) -> TraceError:
        place = f"{self.path}: row {self.rows + row}: {column}"
        advice = f"; {way_out}" if way_out else ""
        return TraceError(f"{place}: expected {expected}, got {got}{advice}")

    def _column(self, name: str, value: Any, count: int) -> np.ndarray:
        """[N, width] of lists; else [N] of one number per row, or of one for all."""
        array = np.asarray(value)
        width = column_width(name, self.header)
        if width:
            if array.shape != (count, width):
                raise self._error(0, name, f"shape {(count, width)}", array.shape)
            return array
        fits = array.ndim <= 1 and array.size in (1, count)
        if not fits or array.dtype.kind not in "iu":
            got = f"{array.dtype} {array.shape}"
            raise self._error(0, name, f"{count} integers", got)
        return np.broadcast_to(array, (count,))

    def _flush(self) -> None:
        """Write what is gathered as one row group."""
        if not self._filled:
            return
        columns = [
            self._arrow(name, self._group[name][: self._filled])
            for name in self._schema.names
        ]
        table = pa.Table.from_arrays(columns, schema=self._schema)
        self._parquet.write_table(table, row_group_size=self._group_rows)
        self._filled = 0

    @staticmethod
    def _arrow(name: str, values: np.ndarray) -> pa.Array:
        if name == "phase":
            return named(values, [phase.label for phase in Phase])

        return numbers(values) if values.ndim == 1 else lists(values)

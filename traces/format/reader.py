"""Reads traces: forward, one sequence at a time, and only the columns asked for.

Everything a replay relies on is checked while it streams past, so a damaged file is
named by file, row and column instead of surfacing later as a wrong number.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from moesim.base.errors import MissingColumnError, TraceError
from moesim.base.inputs import check_file_name
from moesim.base.seals import check_seal
from moesim.traces.format.parquet import open_parquet
from moesim.traces.format.rows import Rows, blocks, check_sequence, checked_rows
from moesim.traces.format.schema import (
    METADATA_KEY,
    OPTIONAL_COLUMNS,
    REQUIRED_COLUMNS,
    ModelShape,
    TraceHeader,
)
from moesim.traces.format.sorting import whole_sequences
from moesim.traces.format.writer import ROW_GROUP_BYTES, ROW_GROUP_ROWS, column_width
from moesim.traces.shipped import no_trace, resolve_trace

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    import pyarrow.parquet as pq

_RENEW = "record or import it again"
_SORT = "sort them: `moesim trace import"
_AGAIN = f"was it cut off while copying? {_RENEW}"


@dataclass(frozen=True, slots=True)
class Passes:
    """Sizes of forward passes: prompt tokens and drafted tokens.

    Attributes:
        micro_batch_tokens: most prompt tokens of a pass; None for whole prompts.
        draft_tokens: tokens that are drafted for each decode pass; 0 for none.
        acceptance: probability that a drafted token is right, given that all before it
            are.
        seed: of the draws of acceptance.
    """

    micro_batch_tokens: int | None = None
    draft_tokens: int = 0
    acceptance: float = 1.0
    seed: int = 0

    def verified(
        self, generated: int, sequence: int = 0
    ) -> Iterator[tuple[int, int, int]]:
        """Cut generated tokens into passes that verify drafts.

        A trace holds the tokens that were kept, so a rejected token has the routing of
        the one that took its place.

        Args:
            generated: tokens of the sequence.
            sequence: its number; each has draws of its own.

        Yields:
            The first token of each pass, how many it computes, and how many are kept.
        """
        draws = np.random.default_rng([self.seed, sequence])
        place = 0
        while place < generated:
            # The last token that was kept comes first: its successor is not known yet.
            computed = min(1 + self.draft_tokens, generated - place)
            # As many numbers in every pass, whatever becomes of them.
            right = draws.random(self.draft_tokens) < self.acceptance
            wrong = np.flatnonzero(~right[: computed - 1])
            kept = int(wrong[0]) + 1 if len(wrong) else computed
            yield place, computed, kept
            place += kept


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

        first_row = 0
        for rows in whole_sequences(self._blocks(optional)):
            yield self._sequence(rows, first_row)
            first_row += len(rows["pos"])

    def _blocks(self, optional: tuple[str, ...]) -> Iterator[dict[str, np.ndarray]]:
        """Checked blocks of rows, name -> array."""
        names = [*REQUIRED_COLUMNS, *optional]
        # As the writer sizes its row groups; files of other writers have larger ones.
        widths = {name: column_width(name, self.header) for name in names}
        row_bytes = sum(2 * max(width, 1) for width in widths.values())
        fitting = max(1024, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES // row_bytes))

        base = 0
        last = (-1, -1)
        with _parquet(self.path) as file:
            # One thread: a replay keeps the other cores for what it times.
            batches = file.iter_batches(fitting, columns=names, use_threads=False)
            while True:
                fault = partial(self._error, base)
                try:
                    batch = next(batches, None)
                    if batch is None:
                        return
                    if not batch.num_rows:
                        continue
                    arrays = {name: [batch.column(name)] for name in names}
                    rows = Rows(arrays, batch.num_rows, fault)
                    (block,) = blocks([rows], keeps_numbers=True, widths=widths)
                except (pa.ArrowException, OSError) as error:
                    reason = _first_line(error)
                    raise TraceError(
                        f"{self.path}: after row {base}: {reason}; {_AGAIN}"
                    ) from None

                block, last = checked_rows(block, self.shape, last, fault)
                yield block
                base += batch.num_rows

    def _error(
        self,
        base: int,
        row: int,
        column: str,
        expected: str,
        got: object,
        way_out: str = _RENEW,
    ) -> TraceError:
        if column == "order":
            way_out = f"{_SORT} {self.path} SORTED`"
        place = f"{self.path}: row {base + row}: {column}"
        return TraceError(f"{place}: expected {expected}, got {got}; {way_out}")

    def _sequence(self, rows: dict[str, np.ndarray], first_row: int) -> SequenceRows:
        """The rows of a sequence, after checking that its steps are whole."""
        error = partial(self._error, first_row)
        places = rows["pos"], rows["phase"], rows["layer"]
        check_sequence(*places, self.shape.layers, error)
        optional = {name: rows[name] for name in rows if name not in REQUIRED_COLUMNS}
        return SequenceRows(
            seq=int(rows["seq"][0]),
            pos=rows["pos"],
            phase=rows["phase"],
            layer=rows["layer"],
            experts=rows["experts"],
            columns=optional,
        )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


@contextmanager
def _parquet(path: Path) -> Iterator[pq.ParquetFile]:
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_parquet(path))
            _ = file.schema_arrow.names  # damaged names show here
        except FileNotFoundError:
            raise no_trace(path) from None
        except IsADirectoryError:
            raise TraceError(
                f"{path}: expected a Parquet file, found a folder"
            ) from None
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if path.suffix == ".gguf":
                raise TraceError(
                    f"{path}: a model, and no trace; `moesim advise` and `moesim model`"
                    " read it, `moesim trace import` makes a trace of what its engine"
                    " wrote"
                ) from None
            raise TraceError(
                f"{path}: not a readable Parquet file: {_first_line(error)}; {_AGAIN}"
            ) from None
        yield file


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

    with _parquet(path) as file:
        metadata = file.schema_arrow.metadata or {}
        if METADATA_KEY not in metadata:
            raise TraceError(
                f"{path}: expected the header 'moesim' in the Parquet metadata, found"
                " none; `moesim trace import` makes a trace of a foreign file"
            )

        header = TraceHeader.from_json(metadata[METADATA_KEY], where=str(path))
        names = file.schema_arrow.names
        missing = [name for name in REQUIRED_COLUMNS if name not in names]
        if missing:
            raise TraceError(
                f"{path}: column {missing[0]!r} is missing, found {', '.join(names)};"
                " `moesim trace import` converts foreign layouts"
            )
        if not file.metadata.num_rows:
            raise TraceError(
                f"{path}: expected at least one row, found an empty trace; {_AGAIN}"
            )
        return Trace(path, file, header, name)

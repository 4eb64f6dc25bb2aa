"""The timeline of a run: what happened, when, on which lane. Simulated and real runs
write it, and every metric reads it.

It is the data of a Gantt chart. Each operation is a *span*; beside the spans stand two
tables, one row per active expert of a layer step (*accesses*) and one row per forward
pass (*steps*). A run can be audited from these tables and the trace alone.

Writing must cost next to nothing while a run is timed: spans are packed bytes, accesses
are kept as the arrays they came in, and both become Parquet a chunk at a time.
"""

from __future__ import annotations

import json
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from moesim.base.errors import TraceError
from moesim.base.files import NewFile
from moesim.base.seals import check_seal
from moesim.traces.format.parquet import (
    codes,
    named,
    numbers,
    open_parquet,
    sealed_writer,
    values,
)
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    import pandas as pd
    import pyarrow.parquet as pq

# Kinds of spans; the numbers are the places of their names.
DENSE = 0
PLAN = 1
COMPUTE = 2
FETCH = 3
PREFETCH = 4
REPLACE = 5
READ = 6
ACTIVATION = 7
JOIN = 8
KIND_NAMES = (
    "dense",
    "plan",
    "compute",
    "fetch",
    "prefetch",
    "replace",
    "read",
    "activation",
    "join",
)
# States of an access; the numbers equal the planner's absent, in flight, resident.
MISS = 0
DELAYED = 1
HIT = 2
STATE_NAMES = ("miss", "delayed", "hit")
PHASE_NAMES = tuple(phase.label for phase in Phase)

CHUNK_SPANS = 65_536
# Layer steps whose accesses are held before they become one chunk.
CHUNK_ACCESSES = 4_096
CHUNK_STEPS = 65_536

METADATA_KEY = b"moesim.timeline"
Chunk = dict[str, np.ndarray]

_NAMES = pa.dictionary(pa.int8(), pa.string())
_SPANS = {
    "lane": np.int8,
    "kind": np.int8,
    "step": np.int32,
    "layer": np.int16,
    "expert": np.int32,
    "start_s": np.float64,
    "end_s": np.float64,
    "bytes": np.int64,
}
_ACCESSES = {
    "step": np.int32,
    "layer": np.int16,
    "expert": np.int32,
    "tokens": np.int32,
    "lane": np.int8,
    "state": np.int8,
}
_STEPS = {
    "step": np.int32,
    "phase": np.int8,
    "batch": np.int32,
    "tokens": np.int32,
    "sequences": np.int32,
    "start_s": np.float64,
    "end_s": np.float64,
}
_SPAN = np.dtype(list(_SPANS.items()))
# Eight numbers as the bytes of one span, in the order of `Timeline.span`.
pack_span = struct.Struct("=bbihiddq").pack
TABLES: dict[str, dict[str, Any]] = {
    "timeline": _SPANS,
    "accesses": _ACCESSES,
    "steps": _STEPS,
}


class Timeline:
    """Record of one run, in memory or, with `out_dir`, in three Parquet files that
    appear on `close`.

    Args:
        lanes: lane names (``cpu``, ``gpu0``, ``h2d0``, ``d2h0``, ``ssd``, ``control``);
            spans name a lane by its index.
        out_dir: folder for ``timeline.parquet``, ``accesses.parquet`` and
            ``steps.parquet``. Then memory does not grow with the length of the run;
            without it chunks are kept as compact arrays.
        sink: takes each chunk, with the name of its table, in place of memory: nothing
            is left to read.

    Attributes:
        spans: bytes of the spans not yet in a chunk; a caller in a hurry may extend it
            by `pack_span` directly.
        operations: what workers did between spans, in a real run; else None.
    """

    def __init__(
        self,
        lanes: Sequence[str],
        out_dir: Path | str | None = None,
        *,
        sink: Callable[[str, Chunk], object] | None = None,
    ) -> None:
        self.lanes = tuple(lanes)
        self.out_dir = None if out_dir is None else Path(out_dir)
        self.spans = bytearray()
        # An `OperationTable`; its module builds on this one.
        self.operations: Any = None
        # Step, layer, and the four arrays of each layer step.
        self._accesses: list[
            tuple[int, int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
        ] = []
        self._steps: list[float] = []
        self._chunks: dict[str, list[Chunk]] = {name: [] for name in TABLES}
        self._writers: dict[str, pq.ParquetWriter] = {}
        self._files: dict[str, NewFile] = {}
        self._open_writers = ExitStack()
        # Columns that hold codes, and the names behind them.
        self._names = {
            "lane": self.lanes,
            "kind": KIND_NAMES,
            "state": STATE_NAMES,
            "phase": PHASE_NAMES,
        }
        self._compute_lanes = _compute_lanes(self.lanes)
        self._is_closed = False
        self._sink = sink
        if self.out_dir is not None:
            try:
                for name in TABLES:
                    self._begin(name)
            except BaseException:
                self.discard()
                raise

    def __enter__(self) -> Self:
        """Record in a block: `close` at its end, `discard` on an exception."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the tables, or leave nothing behind."""
        if kind is None:
            self.close()
        else:
            self.discard()

    def _begin(self, name: str) -> None:
        """Begin the file of a table beside its final name."""
        self._files[name] = NewFile(self._path(name))
        self._open_writers.enter_context(self._files[name].errors_named())
        # A low level: a run that is timed must not wait for its own record.
        writer = sealed_writer(
            self._files[name].path,
            self._schema(name),
            compression="zstd",
            compression_level=1,
            use_dictionary=[each for each in TABLES[name] if each in self._names],
        )
        self._writers[name] = self._open_writers.enter_context(writer)

    # Recording: the hot path.

    def span(
        self,
        lane: int,
        kind: int,
        step: int,
        layer: int,
        expert: int,
        start_s: float,
        end_s: float,
        nbytes: int,
    ) -> None:
        """Note one operation; `expert` is -1 where there is none."""
        self.spans.extend(
            pack_span(lane, kind, step, layer, expert, start_s, end_s, nbytes)
        )

    def access(
        self,
        step: int,
        layer: int,
        experts: np.ndarray,
        tokens: np.ndarray,
        codes: np.ndarray,
        states: np.ndarray,
    ) -> None:
        """Note the active experts of one layer step. The arrays are kept, not copied:
        do not reuse them.

        Args:
            step: forward pass.
            layer: MoE layer.
            experts: int [A].
            tokens: int [A], tokens routed to each.
            codes: int [A], lane code of each: 0 if the CPU computes it, else 1 + GPU.
            states: int [A], MISS, DELAYED or HIT.
        """
        self._accesses.append((step, layer, experts, tokens, codes, states))

    def step(
        self,
        step: int,
        phase: int,
        batch: int,
        tokens: int,
        sequences: int,
        start_s: float,
        end_s: float,
    ) -> None:
        """Note one finished forward pass, and flush what has become a full chunk."""
        self._steps.extend((step, phase, batch, tokens, sequences, start_s, end_s))
        if len(self.spans) >= _SPAN.itemsize * CHUNK_SPANS:
            self._flush_spans()
        if len(self._accesses) >= CHUNK_ACCESSES:
            self._flush_accesses()
        if len(self._steps) >= len(_STEPS) * CHUNK_STEPS:
            self._flush_steps()

    # Chunks.

    def _flush_spans(self) -> None:
        # A copy: recording goes on extending the same bytes.
        rows = np.frombuffer(bytes(self.spans), _SPAN)
        self.spans.clear()
        self.take("timeline", {name: rows[name].copy() for name in _SPANS})

    def _flush_accesses(self) -> None:
        if not self._accesses:
            return

        # Joined only now: a list takes arrays as they come, without a copy.
        step, layer, *arrays = zip(*self._accesses, strict=True)
        self._accesses.clear()
        sizes = [len(experts) for experts in arrays[0]]
        experts, tokens, codes, states = map(np.concatenate, arrays)
        columns = [
            np.repeat(step, sizes),
            np.repeat(layer, sizes),
            experts,
            tokens,
            self._compute_lanes[codes],
            states,
        ]
        chunk = {
            name: values.astype(dtype)
            for values, (name, dtype) in zip(columns, _ACCESSES.items(), strict=True)
        }
        self.take("accesses", chunk)

    def _flush_steps(self) -> None:
        rows = np.array(self._steps, dtype=np.float64).reshape(-1, len(_STEPS))
        self._steps.clear()
        chunk = {
            name: rows[:, i].astype(dtype)
            for i, (name, dtype) in enumerate(_STEPS.items())
        }
        self.take("steps", chunk)

    def _flush(self) -> None:
        self._flush_spans()
        self._flush_accesses()
        self._flush_steps()

    def take(self, table: str, chunk: Chunk) -> None:
        """Take a chunk of a table, in the types of its columns: also from a writer that
        makes chunks itself, whose rows come behind all others.
        """
        if not len(chunk["step"]):
            return

        if self._sink is not None:
            self._sink(table, chunk)
        elif self.out_dir is None:
            self._chunks[table].append(chunk)
        else:
            rows = self._table(table, chunk)
            with self._files[table].errors_named():
                self._writers[table].write_table(rows, row_group_size=CHUNK_SPANS)

    def close(self) -> None:
        """Finish: with `out_dir` the three files now stand under their names. Closing
        twice is harmless.
        """
        if self._is_closed:
            return

        try:
            self._flush()
            # All three are complete before the first gets its name.
            self._open_writers.close()
            for file in self._files.values():
                file.commit()
            self._is_closed = True
        finally:
            self.discard()

    def discard(self) -> None:
        """Leave nothing behind of what is not closed."""
        # Writers end as after an error of theirs: what is given up needs no seal.
        given_up = OSError("given up")
        with suppress(OSError, pa.ArrowException):
            self._open_writers.__exit__(OSError, given_up, None)
        for file in self._files.values():
            file.discard()
        self._writers = {}
        self._files = {}

    @classmethod
    def load(cls, folder: Path | str) -> Timeline:
        """Open the three tables of a finished run.

        Raises:
            TraceError: a table is missing, cut off or foreign.
        """
        folder = Path(folder)
        lanes: tuple[str, ...] = ()

        for table, columns in TABLES.items():
            path = folder / f"{table}.parquet"
            try:
                check_seal(path)
                with open_parquet(path) as file:
                    schema = file.schema_arrow
            except (pa.ArrowException, OSError) as error:
                reason = (str(error).splitlines() or ["unreadable"])[0]
                raise TraceError(
                    f"{path}: not a readable table of a run: {reason}; replay again"
                    " with --out"
                ) from None

            raw = (schema.metadata or {}).get(METADATA_KEY)
            if raw is None or not set(columns) <= set(schema.names):
                raise TraceError(
                    f"{path}: expected a moesim table with columns"
                    f" {', '.join(columns)}, found {', '.join(schema.names)}; replay"
                    " again with --out"
                )
            lanes = tuple(json.loads(raw)["lanes"])

        timeline = cls(lanes)
        timeline.out_dir = folder
        timeline._is_closed = True
        return timeline

    # Reading.

    def chunks(self) -> Iterator[Chunk]:
        """Spans in the order they were recorded: arrays of the columns; lane and kind
        as codes.
        """
        return self._read("timeline")

    def access_chunks(self) -> Iterator[Chunk]:
        """Accesses in the order they were recorded; lane and state as codes."""
        return self._read("accesses")

    def step_chunks(self) -> Iterator[Chunk]:
        """Forward passes in order; `phase` as code of `Phase`."""
        return self._read("steps")

    def _read(self, table: str) -> Iterator[Chunk]:
        if self.out_dir is None:
            self._flush()
            yield from self._chunks[table]
            return

        # The files appear on `close`, and what is read is in them.
        self.close()
        with open_parquet(self._path(table)) as file:
            for batch in file.iter_batches(CHUNK_SPANS, use_threads=False):
                yield {
                    name: codes(batch.column(name), self._names[name])
                    if name in self._names
                    else values(batch.column(name))
                    for name in TABLES[table]
                }

    def frame(self) -> pd.DataFrame:
        """All spans as a data frame with names instead of codes."""
        return self._frame("timeline")

    def access_frame(self) -> pd.DataFrame:
        """All accesses as a data frame with names instead of codes."""
        return self._frame("accesses")

    def step_frame(self) -> pd.DataFrame:
        """All forward passes as a data frame with names instead of codes."""
        return self._frame("steps")

    def _frame(self, table: str) -> pd.DataFrame:
        # The empty table gives a run without a single row its columns.
        empty = self._schema(table).empty_table()
        parts = [self._table(table, chunk) for chunk in self._read(table)]
        frame: pd.DataFrame = pa.concat_tables([empty, *parts]).to_pandas()
        return frame

    def _schema(self, table: str) -> pa.Schema:
        fields = []
        for name, dtype in TABLES[table].items():
            kind = _NAMES if name in self._names else pa.from_numpy_dtype(dtype)
            fields.append(pa.field(name, kind, nullable=False))

        metadata = {METADATA_KEY: json.dumps({"lanes": list(self.lanes)})}
        return pa.schema(fields, metadata=metadata)

    def _table(self, table: str, chunk: Chunk) -> pa.Table:
        """A chunk as Arrow, codes turned into dictionary strings."""
        columns = [
            named(column, self._names[name]) if name in self._names else numbers(column)
            for name, column in chunk.items()
        ]
        return pa.Table.from_arrays(columns, schema=self._schema(table))

    def _path(self, table: str) -> Path:
        assert self.out_dir is not None
        return self.out_dir / f"{table}.parquet"


def _compute_lanes(lanes: Sequence[str]) -> np.ndarray:
    """Index of the lane of every lane code: the CPU's, then each GPU's."""
    gpus = [name for name in lanes if name.startswith("gpu")]
    gpus.sort(key=lambda name: int(name.removeprefix("gpu")))
    index = {name: number for number, name in enumerate(lanes)}
    cpu = index.get("cpu", -1)
    return np.array([cpu, *(index[name] for name in gpus)], np.int8)

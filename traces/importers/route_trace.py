"""BigMoeOnEdge route_trace v1: CSV behind a ``#`` preamble, one row per routed expert,
with the residency it met.

Columns are read by name: turn, phase (0 prefill, 1 decode), step (absolute position),
layer, slot (rank), expert, weight, residency (0 miss, 1 hit, 2 first touch of a
prefetch), expert_bytes, and perhaps dropped. The bytes of each layer's experts replace
the model's; residency goes into ``OUT.residency.parquet`` for `moesim trace
check-residency`.

Source: BigMoeOnEdge docs/telemetry.md, "Route trace".
"""

from __future__ import annotations

import dataclasses
import io
import re
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moesim.base.files import sha256, written_beside
from moesim.traces.format.parquet import numbers, read_metadata, sealed_writer
from moesim.traces.format.sorting import BATCH_ROWS, ApartError, Unordered
from moesim.traces.importers.readers.foreign import (
    NO_WEIGHTS,
    decoding,
    layout_error,
    layout_names,
)
from moesim.traces.importers.readers.sequence_rows import finished, layer_numbers
from moesim.traces.importers.readers.text import csv_columns, head
from moesim.traces.models import model_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

_MAGIC = b"# route_trace v"
_NEEDED = ("turn", "phase", "step", "layer", "slot", "expert")
_TYPES = {
    "turn": "int32",
    "phase": "int8",
    "step": "int64",
    "layer": "int32",
    "slot": "int32",
    "expert": "int32",
    "weight": "float32",
    "residency": "int8",
    "expert_bytes": "int64",
    "dropped": "int8",
}
# The file's columns -> a trace's, or those of the table beside it.
_RENAMED = {
    "turn": "seq",
    "step": "pos",
    "slot": "rank",
    "expert": "experts",
    "weight": "weights",
    "expert_bytes": "read_bytes",
}
OPTIONS = {"map": "a column of the route trace, or ours=theirs, joined by commas"}
# What may stand on the left of a mapping: the layout's names, and ours.
_MAPPED = {name: name for name in _TYPES} | {
    ours: name for name, ours in _RENAMED.items()
}
# The K lines of a cell agree in these, and differ in all others.
_CELL = ("turn", "phase", "step", "layer")
_LIMITS = {"phase": 1, "residency": 2, "dropped": 1}
_RESIDENCY_COLUMNS = ("residency", "dropped", "read_bytes")
_RESIDENCY_SUFFIX = ".residency.parquet"
_RESIDENCY = pa.schema(
    [
        ("seq", pa.int32()),
        ("pos", pa.int32()),
        ("layer", pa.int16()),
        ("slot", pa.int16()),
        ("expert", pa.uint16()),
        ("residency", pa.int8()),
        ("dropped", pa.int8()),
        ("read_bytes", pa.int64()),
    ]
)
RESIDENCY_OF = "trace_sha256"
"""Key of the digest of the trace that residency belongs to, in the file's metadata."""

_PREAMBLE_BYTES = 1 << 20
# A preamble that claims more must not make the dense layers fill the memory.
_MOST_LAYERS = 4096


class Preamble(NamedTuple):
    """What the file says before its rows.

    Attributes:
        facts: words of the model line, such as ``n_expert``.
        expert_bytes: layer -> bytes of one expert; 0 for a layer without.
        dense_bytes: bytes of everything else, all layers.
        columns: names of the columns.
        lines: lines before the first row.
    """

    facts: dict[str, str]
    expert_bytes: dict[int, int]
    dense_bytes: int
    columns: list[str]
    lines: int


def recognises(path: Path) -> bool:
    """Whether the first line is ``# route_trace v…``."""
    return head(path, 64).startswith(_MAGIC)


def provenance(path: Path, **given: str) -> dict[str, Any]:
    """Model and architecture from the preamble, and remarks."""
    opening = preamble(path, given)
    notes = [] if "weight" in opening.columns else [NO_WEIGHTS]
    known = {
        name: opening.facts[name] for name in ("model", "arch") if name in opening.facts
    }
    return known | {"notes": notes}


def own_shape(path: Path, **given: str) -> ModelShape | None:
    """The model as the preamble describes it; None where it does not tell all sizes.

    Widths are stated defaults, for the file knows bytes only.
    """
    opening = preamble(path, given)
    sizes = [size for _, size in sorted(opening.expert_bytes.items()) if size]
    if not sizes or not {"n_expert", "n_expert_used"} <= opening.facts.keys():
        return None
    words = {
        "name": opening.facts.get("model", "route_trace").replace(",", "_"),
        "layers": len(sizes),
        "experts": opening.facts["n_expert"],
        "top_k": opening.facts["n_expert_used"],
        "expert_bytes": max(sizes),
    }
    return model_shape(",".join(f"{name}={value}" for name, value in words.items()))


def reshape(path: Path, shape: ModelShape, **given: str) -> ModelShape:
    """Take layers, experts, top-k, dense layers and the bytes of each layer's experts
    from the preamble.

    Raises:
        TraceError: the preamble describes another model than the shape.
    """
    opening = preamble(path, given)
    expert_bytes = opening.expert_bytes
    sparse = [layer for layer, size in sorted(expert_bytes.items()) if size]

    with decoding(path, "preamble"):
        experts = int(opening.facts.get("n_expert", shape.experts))
        top_k = int(opening.facts.get("n_expert_used", shape.top_k))
    if experts < 1:
        raise layout_error(path, "preamble: n_expert", "1 or more", experts)
    with decoding(path, "preamble"):
        total = int(opening.facts.get("n_layer", 0)) or len(expert_bytes)

    if not max(expert_bytes, default=0) < max(total, 1) <= _MOST_LAYERS:
        expected = f"1..{_MOST_LAYERS}, and a line for each"
        raise layout_error(path, "preamble: n_layer", expected, total)

    for name, count in (("layers", len(sparse)), ("experts", experts)):
        if count and count != getattr(shape, name):
            raise layout_error(
                path,
                f"preamble: {name}",
                f"{getattr(shape, name)} as in {shape.name}",
                count,
                "is the shape right?",
            )

    if not sparse:
        return shape

    # What the preamble says is no assumption any longer.
    still_assumed = [
        name for name in shape.assumed if name not in ("expert_bytes", "other_bytes")
    ]
    return dataclasses.replace(
        shape,
        top_k=top_k if 1 <= top_k <= shape.experts else shape.top_k,
        expert_bytes=tuple(expert_bytes[layer] for layer in sparse),
        other_bytes=opening.dense_bytes or shape.other_bytes,
        dense_layers=tuple(layer for layer in range(total) if layer not in sparse),
        assumed=tuple(still_assumed),
    )


def read(path: Path, shape: ModelShape, **given: str) -> Unordered:
    """The file's rows, a turn of the session being a sequence."""
    rows = _Rows(path, shape, given)
    return Unordered(rows.pieces, rows.finished)


# -- residency, beside the trace -------------------------------------------------------


def residency_path(trace: Path) -> Path:
    """Return where the residency beside a trace is written."""
    return trace.with_name(trace.name + _RESIDENCY_SUFFIX)


def find_residency(trace: Path, digest: str) -> Path:
    """Return the residency of a trace: beside it under its name, else the file of its
    folder that was written with it, whatever either is called now.
    """
    expected = residency_path(trace)
    if expected.is_file():
        return expected
    for path in sorted(trace.parent.glob(f"*{_RESIDENCY_SUFFIX}")):
        try:
            metadata = read_metadata(path)
        except (pa.ArrowException, OSError):
            # Not ours to judge: it is none that belongs here.
            continue
        if metadata.get(RESIDENCY_OF.encode()) == digest.encode():
            return path
    return expected


@contextmanager
def beside(out: Path) -> Iterator[Callable[[Block], Block]]:
    """Write ``OUT.residency.parquet`` where blocks have residency, a row per access;
    blocks lose those columns.
    """
    writer: pq.ParquetWriter | None = None

    with ExitStack() as stack:

        def without_residency(block: Block) -> Block:
            nonlocal writer
            residency = {
                name: block.pop(name) for name in _RESIDENCY_COLUMNS if name in block
            }
            if "residency" not in residency:
                return block

            # Opened at the first need: most files tell no residency.
            if writer is None:
                part = stack.enter_context(written_beside(residency_path(out)))
                writer = stack.enter_context(_residency_writer(part))

            for start in range(0, len(block["pos"]), BATCH_ROWS):
                rows = slice(start, start + BATCH_ROWS)
                writer.write_table(_accesses(block, residency, rows))
            return block

        yield without_residency

        # The trace is complete by now. A file that is renamed keeps its digest.
        if writer is not None:
            writer.add_key_value_metadata({RESIDENCY_OF: sha256(out)})


def _residency_writer(path: Path) -> AbstractContextManager[pq.ParquetWriter]:
    return sealed_writer(
        path,
        _RESIDENCY,
        compression="zstd",
        use_dictionary=[name for name in _RESIDENCY.names if name != "expert"],
        column_encoding={"expert": "BYTE_STREAM_SPLIT"},
        write_statistics=False,
    )


def _accesses(block: Block, residency: Block, rows: slice) -> pa.Table:
    """A row per access of some rows [N, K] of a block."""
    experts = block["experts"][rows]
    count, top_k = experts.shape

    kinds = {field.name: field.type.to_pandas_dtype() for field in _RESIDENCY}
    columns = {
        # Narrowed before there are K of each.
        name: np.repeat(block[name][rows].astype(kinds[name]), top_k)
        for name in ("seq", "pos", "layer")
    }
    columns["slot"] = np.tile(np.arange(top_k, dtype=kinds["slot"]), count)
    columns["expert"] = experts.reshape(-1)
    for name in _RESIDENCY_COLUMNS:
        known = name in residency
        column = residency[name][rows].reshape(-1) if known else None
        columns[name] = np.zeros(count * top_k) if column is None else column

    arrays = [
        numbers(columns[name].astype(kind, copy=False)) for name, kind in kinds.items()
    ]
    return pa.Table.from_arrays(arrays, schema=_RESIDENCY)


# -- preamble --------------------------------------------------------------------------


def preamble(path: Path, given: dict[str, str]) -> Preamble:
    """Read the lines before the rows.

    Args:
        path: the file.
        given: options, of which ``map`` counts.

    Raises:
        TraceError: another version, or no header line.
    """
    names = layout_names(path, given, _MAPPED)
    facts: dict[str, str] = {}
    expert_bytes: dict[int, int] = {}
    dense_bytes = 0

    # Comments may hold anything; only what is looked for must be readable.
    start = io.BytesIO(head(path, _PREAMBLE_BYTES))
    text = io.TextIOWrapper(start, encoding="utf-8", errors="replace")
    lines = (line.rstrip("\n") for line in text)
    version = next(lines, "nothing")
    if version.strip() != "# route_trace v1":
        raise layout_error(
            path, "line 1", "# route_trace v1", version[:40], "is there a newer moesim?"
        )

    number = 1
    for number, line in enumerate(lines, start=2):
        if not line.startswith("#"):
            columns = _header_columns(path, number, line, names)
            return Preamble(facts, expert_bytes, dense_bytes, columns, number)

        with decoding(path, f"line {number}"):
            facts_of_line = dict(re.findall(r"(\w+)=(\S+)", line))
            if "expert_bytes" not in facts_of_line:
                facts |= facts_of_line
                continue

            layer = int(facts_of_line["layer"])
            expert_bytes[layer] = int(facts_of_line["expert_bytes"])
            of_layer = int(facts_of_line["dense_bytes"])
            dense_bytes += of_layer

        if min(layer, expert_bytes[layer], of_layer) < 0:
            raise layout_error(path, f"line {number}", "numbers from 0", line[:80])

    raise layout_error(
        path,
        f"line {number}",
        "a header line behind the preamble",
        "the end of the file",
    )


def _header_columns(
    path: Path, number: int, line: str, names: dict[str, str]
) -> list[str]:
    """The columns as this layout calls them; `names` has what the file calls them."""
    columns = [name.strip() for name in line.split(",")]

    missing = [names[name] for name in _NEEDED if names[name] not in columns]
    # A column that is mapped must be there, needed or not.
    missing += [
        theirs
        for name, theirs in names.items()
        if name != theirs and theirs not in columns
    ]
    if missing:
        raise layout_error(
            path, f"line {number}", f"a column {missing[0]!r}", line[:80]
        )
    if len(set(columns)) != len(columns):
        raise layout_error(path, f"line {number}", "every column once", line[:80])

    by_theirs = {theirs: name for name, theirs in names.items()}
    # One that bears the name of a mapped column is another one.
    return [by_theirs.get(column, f"their {column}") for column in columns]


# -- rows ------------------------------------------------------------------------------


class _Rows:
    """The rows of the file, K lines each.

    An engine writes the K lines of a cell (turn, phase, step, layer) one after the
    other. Where some stand apart, the file is read again with a row per line, which
    then are sorted; and again without weights where one is not finite.
    """

    def __init__(self, path: Path, shape: ModelShape, given: dict[str, str]) -> None:
        self._path = path
        self._shape = shape
        self._preamble = preamble(path, given)
        self._types = {
            name: _TYPES[name] for name in self._preamble.columns if name in _TYPES
        }
        self._apart = False
        self._top_k = 0
        self._sequences = 0

    def pieces(self) -> Iterator[Block]:
        """Rows in the order of the file; `seq` is the turn, `layer` as the engine
        counts.
        """
        self._top_k = 0
        self._sequences = 0
        pending: Block = {}
        any_row = False

        for first_row, lines in csv_columns(
            self._path, self._preamble.columns, self._types, self._preamble.lines
        ):
            any_row = True
            self._check(first_row, lines)

            if "weight" in lines and not np.isfinite(lines["weight"]).all():
                # One unknown weight makes all unknown: read again without them.
                del self._types["weight"]
                raise ApartError

            if self._apart:
                yield _renamed(lines)
                continue

            rows = _behind(pending, lines)
            if not self._top_k:
                starts = np.flatnonzero(rows["slot"][1:] == 0)
                self._top_k = int(starts[0]) + 1 if len(starts) else len(rows["slot"])

            # The last cell may go on in what is not read yet.
            end = len(rows["slot"]) // self._top_k * self._top_k
            yield self._cells({name: column[:end] for name, column in rows.items()})
            pending = {name: column[end:] for name, column in rows.items()}

        if not any_row:
            raise layout_error(self._path, "rows", "values in every column", "no row")
        if pending and len(pending["slot"]):
            self._read_apart()

    def finished(self, block: Block) -> Block:
        """A whole, sorted sequence as the writer takes it."""
        if "rank" in block:
            block = self._gathered(block)

        block = finished(self._path, self._shape, block)
        # Turns need not be counted from 0.
        block["seq"] = np.full(len(block["pos"]), self._sequences, np.int32)
        self._sequences += 1
        return block

    def _check(self, first_row: int, lines: Block) -> None:
        for name, most in _LIMITS.items():
            if name in lines:
                self._check_range(first_row, lines, name, f"0..{most}", most + 1)

        self._check_range(
            first_row,
            lines,
            "step",
            "an absolute position",
            1 << 31,
            "a row that belongs to no token",
        )
        self._check_range(
            first_row,
            lines,
            "expert",
            f"0..{self._shape.experts - 1}",
            self._shape.experts,
            "is the shape right?",
        )

    def _check_range(
        self,
        first_row: int,
        lines: Block,
        name: str,
        expected: str,
        limit: int,
        way_out: str = "dump it again",
    ) -> None:
        column = lines[name]
        if 0 <= column.min() <= column.max() < limit:
            return

        row = int(((column < 0) | (column >= limit)).argmax())
        place = f"row {first_row + row}: {name}"
        raise layout_error(self._path, place, expected, column[row], way_out)

    def _read_apart(self) -> NoReturn:
        """Have the file read again, with a row per line."""
        self._apart = True
        raise ApartError

    def _cells(self, lines: Block) -> Block:
        """A row for every K lines."""
        cells = {
            name: column.reshape(-1, self._top_k) for name, column in lines.items()
        }
        in_order = (cells["slot"] == np.arange(self._top_k)).all()
        if not in_order or any(_differs(cells[name]) for name in _CELL):
            self._read_apart()

        return _renamed(_first_of(cells, _CELL))

    def _gathered(self, block: Block) -> Block:
        """A row for every K lines that stood anywhere in the file, sorted by now."""
        rank = block["rank"]
        top_k = int(rank.max()) + 1
        self._top_k = self._top_k or top_k

        names = ("pos", "layer", "phase")
        is_complete = top_k == self._top_k and len(rank) % top_k == 0
        if is_complete:
            cells = {
                name: column.reshape(-1, top_k)
                for name, column in block.items()
                if name != "rank"
            }
            is_complete = (rank.reshape(-1, top_k) == np.arange(top_k)).all()
            is_complete = is_complete and not any(
                _differs(cells[name]) for name in names
            )

        if not is_complete:
            raise self._incomplete(block)
        return _first_of(cells, ("seq", *names))

    def _incomplete(self, block: Block) -> Exception:
        """The error of the first line whose slot is not the one that is due."""
        rank = block["rank"]
        due = np.resize(np.arange(self._top_k), len(rank))
        row = int((rank != due).argmax())

        # Layers as moesim counts them, which is how other errors name them.
        used = np.unique(block["layer"]).tolist()
        number_of = layer_numbers(self._path, used, self._shape)
        engine_layer = int(block["layer"][row])
        layer = number_of.get(engine_layer, engine_layer)

        where = (
            f"turn {block['seq'][row]}, step {int(block['pos'][row])}, layer {layer}"
        )
        expected = f"slots 0..{self._top_k - 1}, once each"
        return layout_error(self._path, where, expected, "others")


def _behind(pending: Block, lines: Block) -> Block:
    """Lines behind those that wait for the rest of their cell."""
    if not pending:
        return lines

    return {
        name: np.concatenate((pending[name], column)) for name, column in lines.items()
    }


def _differs(cell: np.ndarray) -> bool:
    """Whether the K lines of a cell disagree, of any cell of [N, K]."""
    return bool((cell[:, 1:] != cell[:, :1]).any())


def _first_of(cells: Block, names: tuple[str, ...]) -> Block:
    """Cells [N, K] with one value [N] in those columns in which their lines agree."""
    # A copy lets go of the other values.
    return {
        name: column[:, 0].copy() if name in names else column
        for name, column in cells.items()
    }


def _renamed(lines: Block) -> Block:
    """The file's columns under a trace's names."""
    renamed = {_RENAMED.get(name, name): column for name, column in lines.items()}
    if lines["slot"].ndim == 2:  # gathered already: the rank is the place in the row
        del renamed["rank"]

    renamed["pos"] = renamed["pos"].astype(np.int32)
    renamed["experts"] = renamed["experts"].astype(np.uint16)
    return renamed

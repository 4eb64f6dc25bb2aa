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
import re
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from moesim.traces.files import written_beside
from moesim.traces.format.arrow import numbers
from moesim.traces.format.sorting import BATCH_ROWS, ApartError, Unordered
from moesim.traces.importers.readers.csv_numbers import number_columns
from moesim.traces.importers.readers.foreign import (
    NO_WEIGHTS,
    bad,
    decoding,
    finished,
    head,
    layer_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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
_OURS = {
    "turn": "seq",
    "step": "pos",
    "slot": "rank",
    "expert": "experts",
    "weight": "weights",
    "expert_bytes": "read_bytes",
}
_OF_CELL = ("turn", "phase", "step", "layer")
_BESIDE = ("residency", "dropped", "read_bytes")
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
_PREAMBLE_BYTES = 1 << 20
_MOST_LAYERS = 4096


class Preamble(NamedTuple):
    """What the file says before its rows: the words of the model line, expert and dense
    bytes by layer, columns.
    """

    facts: dict[str, str]
    expert_bytes: dict[int, int]
    dense_bytes: int
    columns: list[str]
    lines: int


def recognises(path: Path) -> bool:
    """Whether the first line is ``# route_trace v…``."""
    return head(path, 64).startswith(_MAGIC)


def provenance(path: Path) -> dict[str, Any]:
    """Model and architecture from the preamble, and remarks."""
    told = preamble(path)
    notes = []
    if "weight" not in told.columns:
        notes.append(NO_WEIGHTS)
    return {
        name: told.facts[name] for name in ("model", "arch") if name in told.facts
    } | {"notes": notes}


def reshape(path: Path, shape: ModelShape) -> ModelShape:
    """Take layers, experts, top-k, dense layers and the bytes of each layer's experts
    from the preamble.

    Raises:
        TraceError: the preamble describes another model than the shape.
    """
    told = preamble(path)
    sparse = [layer for layer, size in sorted(told.expert_bytes.items()) if size]
    with decoding(path, "preamble"):
        experts, used, total = (
            int(told.facts.get(name, default))
            for name, default in (
                ("n_expert", shape.experts),
                ("n_expert_used", shape.top_k),
                ("n_layer", 0),
            )
        )
    total = total or len(told.expert_bytes)
    if not max(told.expert_bytes, default=0) < max(total, 1) <= _MOST_LAYERS:
        raise bad(
            path, "preamble: n_layer", f"1..{_MOST_LAYERS}, and a line for each", total
        )
    for name, found in (("layers", len(sparse)), ("experts", experts)):
        if found and found != getattr(shape, name):
            raise bad(
                path,
                f"preamble: {name}",
                f"{getattr(shape, name)} as in {shape.name}",
                found,
                "is the shape right?",
            )
    if not sparse:
        return shape
    return dataclasses.replace(
        shape,
        top_k=used if 1 <= used <= shape.experts else shape.top_k,
        expert_bytes=tuple(told.expert_bytes[layer] for layer in sparse),
        other_bytes=told.dense_bytes or shape.other_bytes,
        dense_layers=tuple(layer for layer in range(total) if layer not in sparse),
        assumed=tuple(
            name
            for name in shape.assumed
            if name not in ("expert_bytes", "other_bytes")
        ),
    )


def read(path: Path, shape: ModelShape) -> Unordered:
    """The file's rows, a turn of the session being a sequence."""
    rows = _Rows(path, shape)
    return Unordered(rows.pieces, rows.finished)


@contextmanager
def beside(out: Path) -> Iterator[Callable[[Block], Block]]:
    """Write ``OUT.residency.parquet`` where blocks tell it, a row per access; blocks
    lose those columns.
    """
    writer: pq.ParquetWriter | None = None
    with ExitStack() as stack:

        def kept(block: Block) -> Block:
            nonlocal writer
            told = {name: block.pop(name) for name in _BESIDE if name in block}
            if "residency" in told:
                if writer is None:
                    part = stack.enter_context(written_beside(residency_path(out)))
                    writer = stack.enter_context(
                        pq.ParquetWriter(
                            part,
                            _RESIDENCY,
                            compression="zstd",
                            use_dictionary=[
                                name for name in _RESIDENCY.names if name != "expert"
                            ],
                            column_encoding={"expert": "BYTE_STREAM_SPLIT"},
                            write_statistics=False,
                        )
                    )
                for start in range(0, len(block["pos"]), BATCH_ROWS):
                    part_of = slice(start, start + BATCH_ROWS)
                    writer.write_table(
                        _accesses(
                            *(
                                {n: c[part_of] for n, c in one.items()}
                                for one in (block, told)
                            )
                        )
                    )
            return block

        yield kept


def _accesses(block: Block, told: Block) -> pa.Table:
    """A row per access of rows [N, K]."""
    count, top_k = block["experts"].shape
    columns = {
        **{name: np.repeat(block[name], top_k) for name in ("seq", "pos", "layer")},
        "slot": np.tile(np.arange(top_k), count),
        "expert": block["experts"].reshape(-1),
        **{
            name: told[name].reshape(-1) if name in told else np.zeros(count * top_k)
            for name in _BESIDE
        },
    }
    types = [field.type.to_pandas_dtype() for field in _RESIDENCY]
    arrays = [
        numbers(column.astype(dtype))
        for column, dtype in zip(columns.values(), types, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=_RESIDENCY)


def residency_path(trace: Path) -> Path:
    """Where the residency beside a trace lies."""
    return trace.with_name(trace.name + ".residency.parquet")


def preamble(path: Path) -> Preamble:
    """Read the lines before the rows.

    Raises:
        TraceError: another version, or no header line.
    """
    facts: dict[str, str] = {}
    experts: dict[int, int] = {}
    dense = 0
    lines = head(path, _PREAMBLE_BYTES).decode("utf-8", "replace").splitlines()
    if not lines or lines[0].strip() != "# route_trace v1":
        raise bad(
            path,
            "line 1",
            "# route_trace v1",
            lines[0][:40] if lines else "nothing",
            "is there a newer moesim?",
        )
    for number, line in enumerate(lines):
        if not line.startswith("#"):
            columns = [name.strip() for name in line.split(",")]
            if missing := [name for name in _NEEDED if name not in columns]:
                raise bad(
                    path, f"line {number + 1}", f"a column {missing[0]!r}", line[:80]
                )
            if len(set(columns)) != len(columns):
                raise bad(path, f"line {number + 1}", "every column once", line[:80])
            return Preamble(facts, experts, dense, columns, number + 1)
        with decoding(path, f"line {number + 1}"):
            words = dict(re.findall(r"(\w+)=(\S+)", line))
            if "expert_bytes" in words:
                layer, size, beside = (
                    int(words[name])
                    for name in ("layer", "expert_bytes", "dense_bytes")
                )
                if min(layer, size, beside) < 0:
                    raise bad(path, f"line {number + 1}", "numbers from 0", line[:80])
                experts[layer] = size
                dense += beside
            else:
                facts |= words
    raise bad(
        path,
        f"line {len(lines)}",
        "a header line behind the preamble",
        "the end of the file",
    )


class _Rows:
    """The rows of the file, K lines each.

    An engine writes the K lines of a cell (turn, phase, step, layer) behind each other.
    Where some stand apart, the file is read again with a row per line, which then are
    sorted; and again without weights where one is not finite.
    """

    def __init__(self, path: Path, shape: ModelShape) -> None:
        self._path, self._shape, self._told = path, shape, preamble(path)
        self._types = {
            name: _TYPES[name] for name in self._told.columns if name in _TYPES
        }
        self._apart = False
        self._top_k = self._sequences = 0

    def pieces(self) -> Iterator[Block]:
        """Rows in the order of the file; `seq` is the turn, `layer` as the engine
        counts.
        """
        self._top_k = self._sequences = 0
        held: Block = {}
        last = -1
        for base, found in number_columns(
            self._path, self._told.columns, self._types, self._told.lines
        ):
            self._check(base, found)
            if "weight" in found and not np.isfinite(found["weight"]).all():
                del self._types["weight"]
                raise ApartError
            last = base
            if self._apart:
                yield _renamed(found)
                continue
            rows = (
                {
                    name: np.concatenate((held[name], column))
                    for name, column in found.items()
                }
                if held
                else found
            )
            if not self._top_k:
                starts = np.flatnonzero(rows["slot"][1:] == 0)
                self._top_k = int(starts[0]) + 1 if len(starts) else len(rows["slot"])
            whole = len(rows["slot"]) // self._top_k * self._top_k
            yield self._cells({name: column[:whole] for name, column in rows.items()})
            held = {name: column[whole:] for name, column in rows.items()}
        if last < 0:
            raise bad(self._path, "rows", "values in every column", "no row")
        if held and len(held["slot"]):
            self._stand_apart()

    def finished(self, block: Block) -> Block:
        """A whole, sorted sequence as the writer takes it."""
        if "rank" in block:
            block = self._gathered(block)
        block = finished(self._path, self._shape, block)
        block["seq"] = np.full(len(block["pos"]), self._sequences, np.int32)
        self._sequences += 1
        return block

    def _check(self, base: int, rows: Block) -> None:
        for name, least, most in (
            ("phase", 0, 1),
            ("residency", 0, 2),
            ("dropped", 0, 1),
        ):
            if (
                name in rows
                and not least <= rows[name].min() <= rows[name].max() <= most
            ):
                row = int(((rows[name] < least) | (rows[name] > most)).argmax())
                raise bad(
                    self._path,
                    f"row {base + row}: {name}",
                    f"{least}..{most}",
                    rows[name][row],
                )
        step = rows["step"]
        expert = rows["expert"]
        if step.min() < 0 or step.max() >= 1 << 31:
            row = int(((step < 0) | (step >= 1 << 31)).argmax())
            way_out = "a row that belongs to no token"
            raise bad(
                self._path,
                f"row {base + row}: step",
                "an absolute position",
                step[row],
                way_out,
            )
        if not 0 <= expert.min() <= expert.max() < self._shape.experts:
            row = int(((expert < 0) | (expert >= self._shape.experts)).argmax())
            expected = f"0..{self._shape.experts - 1}"
            raise bad(
                self._path,
                f"row {base + row}: expert",
                expected,
                expert[row],
                "is the shape right?",
            )

    def _stand_apart(self) -> NoReturn:
        self._apart = True
        raise ApartError

    def _cells(self, rows: Block) -> Block:
        """A row for every K lines."""
        cells = {name: column.reshape(-1, self._top_k) for name, column in rows.items()}
        same = (cells[name] for name in ("turn", "phase", "step", "layer"))
        if not (cells["slot"] == np.arange(self._top_k)).all() or any(
            (one[:, 1:] != one[:, :1]).any() for one in same
        ):
            self._stand_apart()
        return _renamed(
            {
                name: cells[name][:, 0] if name in _OF_CELL else cells[name]
                for name in cells
            }
        )

    def _gathered(self, block: Block) -> Block:
        """A row for every K lines that stood anywhere in the file."""
        top_k = int(block["rank"].max()) + 1
        self._top_k = self._top_k or top_k
        cell = np.stack([block[name] for name in ("pos", "layer", "phase")])
        whole = (
            len(block["rank"]) % top_k == 0
            and (block["rank"].reshape(-1, top_k) == np.arange(top_k)).all()
        )
        if (
            top_k != self._top_k
            or not whole
            or (
                cell.reshape(3, -1, top_k) != cell.reshape(3, -1, top_k)[:, :, :1]
            ).any()
        ):
            row = int(
                (
                    block["rank"]
                    != np.resize(np.arange(self._top_k), len(block["rank"]))
                ).argmax()
            )
            step, layer, _ = cell[:, row].tolist()
            layer = layer_numbers(
                self._path, np.unique(block["layer"]).tolist(), self._shape
            ).get(layer, layer)
            place = f"turn {block['seq'][row]}, step {step}, layer {layer}"
            raise bad(
                self._path, place, f"slots 0..{self._top_k - 1}, once each", "others"
            )
        cells = {
            name: column.reshape(-1, top_k)
            for name, column in block.items()
            if name != "rank"
        }
        return {
            name: cells[name][:, 0]
            if name in ("seq", *_OF_CELL, "pos")
            else cells[name]
            for name in cells
        }


def _renamed(rows: Block) -> Block:
    """The file's columns under our names."""
    renamed = {_OURS.get(name, name): column for name, column in rows.items()}
    if rows["slot"].ndim == 2:
        del renamed["rank"]
    renamed["pos"] = renamed["pos"].astype(np.int32)
    renamed["experts"] = renamed["experts"].astype(np.uint16)
    return renamed

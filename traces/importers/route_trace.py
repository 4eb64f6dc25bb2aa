"""BigMoeOnEdge route_trace v1: CSV behind a ``#`` preamble, one row per routed expert, with the residency it met.

Columns are read by name: turn, phase (0 prefill, 1 decode), step (absolute position), layer, slot (rank), expert,
weight, residency (0 miss, 1 hit, 2 first touch of a prefetch), expert_bytes, and perhaps dropped. The bytes of each
layer's experts replace the model's; residency goes into ``OUT.residency.parquet`` for `moesim trace check-residency`.

Source: BigMoeOnEdge docs/telemetry.md, "Route trace".
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from traces.arrow import numbers
from traces.files import written_beside
from traces.foreign import Once, bad, decoding, head, layer_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from traces.schema import ModelShape

    Block = dict[str, np.ndarray]

_MAGIC = b"# route_trace v"
_NEEDED = ("turn", "phase", "step", "layer", "slot", "expert")
_TYPES = {
    "turn": "int32", "phase": "int8", "step": "int64", "layer": "int32", "slot": "int32", "expert": "int32",
    "weight": "float32", "residency": "int8", "expert_bytes": "int64", "dropped": "int8",
}  # fmt: skip
_PREAMBLE_BYTES = 1 << 20
_MOST_LAYERS = 4096


class Preamble(NamedTuple):
    """What the file says before its rows: the words of the model line, expert and dense bytes by layer, columns."""

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
        notes.append("no combine weights in the source")
    return {name: told.facts[name] for name in ("model", "arch") if name in told.facts} | {"notes": notes}


def reshape(path: Path, shape: ModelShape) -> ModelShape:
    """Take layers, experts, top-k, dense layers and the bytes of each layer's experts from the preamble.

    Raises:
        TraceError: the preamble describes another model than the shape.
    """
    told = preamble(path)
    sparse = [layer for layer, size in sorted(told.expert_bytes.items()) if size]
    with decoding(path, "preamble"):
        experts, used, total = (
            int(told.facts.get(name, default))
            for name, default in (("n_expert", shape.experts), ("n_expert_used", shape.top_k), ("n_layer", 0))
        )
    total = total or len(told.expert_bytes)
    if not max(told.expert_bytes, default=0) < max(total, 1) <= _MOST_LAYERS:
        raise bad(path, "preamble: n_layer", f"1..{_MOST_LAYERS}, and a line for each", total)
    for name, found in (("layers", len(sparse)), ("experts", experts)):
        if found and found != getattr(shape, name):
            raise bad(
                path, f"preamble: {name}", f"{getattr(shape, name)} as in {shape.name}", found, "is the shape right?"
            )
    if not sparse:
        return shape
    return dataclasses.replace(
        shape,
        top_k=used if 1 <= used <= shape.experts else shape.top_k,
        expert_bytes=tuple(told.expert_bytes[layer] for layer in sparse),
        other_bytes=told.dense_bytes or shape.other_bytes,
        dense_layers=tuple(layer for layer in range(total) if layer not in sparse),
        assumed=tuple(name for name in shape.assumed if name not in ("expert_bytes", "other_bytes")),
    )


def read(path: Path, shape: ModelShape) -> Iterator[Block]:
    """One block per turn of the session; the whole file is parsed at once."""
    rows = _sorted(path, shape, _parsed.kept(path))
    top_k = _width(path, rows)
    first = slice(None, None, top_k)
    weights = rows["weight"].reshape(-1, top_k) if "weight" in rows else None
    known = weights is not None and bool(np.isfinite(weights).all())
    block = {
        "seq": np.cumsum(np.concatenate(([0], np.diff(rows["turn"][first]) != 0))).astype(np.int32),
        "pos": rows["step"][first],
        "phase": rows["phase"][first],
        "layer": rows["layer"][first].astype(np.int16),
        "experts": rows["expert"].reshape(-1, top_k),
    }
    if known and weights is not None:
        block["weights"] = weights
    edges = np.searchsorted(block["seq"], np.arange(block["seq"][-1] + 2))
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        yield {name: values[start:stop] for name, values in block.items()}


def beside(path: Path, shape: ModelShape, out: Path) -> None:
    """Write ``OUT.residency.parquet``: seq, pos, layer, expert, residency, dropped, read_bytes, in trace order."""
    rows = _sorted(path, shape, _parsed.taken(path))
    if "residency" not in rows:
        return
    top_k = _width(path, rows)
    turn = rows["turn"]
    sequence = np.cumsum(np.concatenate(([0], np.diff(turn) != 0)))
    zeros = np.zeros(len(turn), np.int8)
    columns: dict[str, np.ndarray] = {
        "seq": sequence.astype(np.int32),
        "pos": rows["step"].astype(np.int32),
        "layer": rows["layer"].astype(np.int16),
        "slot": np.tile(np.arange(top_k, dtype=np.int16), len(turn) // top_k),
        "expert": rows["expert"].astype(np.uint16),
        "residency": rows["residency"],
        "dropped": rows.get("dropped", zeros),
        "read_bytes": rows.get("expert_bytes", zeros.astype(np.int64)),
    }
    with written_beside(residency_path(out)) as part:
        pq.write_table(pa.table({name: numbers(values) for name, values in columns.items()}), part, compression="zstd")


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
        raise bad(path, "line 1", "# route_trace v1", lines[0][:40] if lines else "nothing", "is there a newer moesim?")
    for number, line in enumerate(lines):
        if not line.startswith("#"):
            columns = [name.strip() for name in line.split(",")]
            if missing := [name for name in _NEEDED if name not in columns]:
                raise bad(path, f"line {number + 1}", f"a column {missing[0]!r}", line[:80])
            if len(set(columns)) != len(columns):
                raise bad(path, f"line {number + 1}", "every column once", line[:80])
            return Preamble(facts, experts, dense, columns, number + 1)
        with decoding(path, f"line {number + 1}"):
            words = dict(re.findall(r"(\w+)=(\S+)", line))
            if "expert_bytes" in words:
                layer, size, beside = (int(words[name]) for name in ("layer", "expert_bytes", "dense_bytes"))
                if min(layer, size, beside) < 0:
                    raise bad(path, f"line {number + 1}", "numbers from 0", line[:80])
                experts[layer] = size
                dense += beside
            else:
                facts |= words
    raise bad(path, f"line {len(lines)}", "a header line behind the preamble", "the end of the file")


def _table(path: Path) -> dict[str, np.ndarray]:
    """The columns of the rows as they stand in the file."""
    from pyarrow import csv  # noqa: PLC0415 - not every import is of text

    told = preamble(path)
    wanted = [name for name in told.columns if name in _TYPES]
    with decoding(path, "CSV"):
        table = csv.read_csv(
            path,
            read_options=csv.ReadOptions(column_names=told.columns, skip_rows=told.lines, use_threads=False),
            convert_options=csv.ConvertOptions(
                include_columns=wanted, column_types={name: _TYPES[name] for name in wanted}, null_values=[],
                strings_can_be_null=False,
            ),
        )  # fmt: skip
        rows = {name: np.asarray(table.column(name).combine_chunks()) for name in wanted}
    if not len(table) or any(table.column(name).null_count for name in wanted):
        raise bad(path, "rows", "values in every column", "empty values" if len(table) else "no row")
    return rows


_parsed = Once(_table)


def _sorted(path: Path, shape: ModelShape, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All rows by turn, step, layer, slot; layers counted as MoE layers."""
    rows = dict(found)
    for name, least, most in (("phase", 0, 1), ("residency", 0, 2), ("dropped", 0, 1)):
        if name in rows and not least <= rows[name].min() <= rows[name].max() <= most:
            outside = (rows[name] < least) | (rows[name] > most)
            row = int(outside.argmax())
            raise bad(path, f"row {row}: {name}", f"{least}..{most}", rows[name][row])
    if rows["step"].min() < 0 or rows["step"].max() >= 1 << 31:
        row = int(((rows["step"] < 0) | (rows["step"] >= 1 << 31)).argmax())
        raise bad(path, f"row {row}: step", "an absolute position", rows["step"][row], "a row that belongs to no token")
    number_of = layer_numbers(path, np.unique(rows["layer"]).tolist(), shape)
    table_of = np.full(max(*number_of, int(rows["layer"].max())) + 1, -1)
    table_of[list(number_of)] = list(number_of.values())
    rows["layer"] = table_of[rows["layer"]]
    if rows["layer"].min() < 0:
        raise bad(
            path, f"row {int(rows['layer'].argmin())}: layer", "an MoE layer", "a dense one", "is the shape right?"
        )
    order = np.lexsort((rows["slot"], rows["layer"], rows["step"], rows["turn"]))
    return {name: values[order] for name, values in rows.items()}


def _width(path: Path, rows: dict[str, np.ndarray]) -> int:
    """K: rows per cell (turn, phase, step, layer), the same in every cell, slots 0..K-1."""
    top_k = int(rows["slot"].max()) + 1
    cell = np.stack([rows[name] for name in ("turn", "step", "layer", "phase")])
    whole = len(rows["slot"]) % top_k == 0 and (rows["slot"].reshape(-1, top_k) == np.arange(top_k)).all()
    if not whole or (cell.reshape(4, -1, top_k) != cell.reshape(4, -1, top_k)[:, :, :1]).any():
        due = np.resize(np.arange(top_k), len(rows["slot"]))
        row = int((rows["slot"] != due).argmax())
        turn, step, layer, _ = cell[:, row].tolist()
        raise bad(path, f"turn {turn}, step {step}, layer {layer}", f"slots 0..{top_k - 1}, once each", "others")
    return top_k

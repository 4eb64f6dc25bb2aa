"""Plain Parquet or CSV with a column mapping: ``map`` = pos=position,experts=topk_ids,layer=layer_id,….

Ours on the left, the file's on the right: seq, pos, phase, layer, experts, weights, scores, token; or expert (one row
per selected expert) with rank. ``experts=e*`` gathers the columns e0, e1, …. Names that are the same need no mapping.
In CSV a list is written in one field, its numbers apart by blanks, semicolons or bars, brackets or not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from traces.arrow import codes, flat, values
from traces.foreign import NO_PHASES, bad, decoding, head, long_blocks, whole_number
from traces.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from traces.schema import ModelShape

    Block = dict[str, np.ndarray]

GENERIC = True
OPTIONS = {
    "map": "our column=theirs, joined by commas",
    "prompt_tokens": "how many of the first tokens of every sequence are prompt",
}
_OURS = ("seq", "pos", "phase", "layer", "experts", "expert", "rank", "weights", "weight", "scores", "token")
_LISTS = ("experts", "weights", "scores")
_PHASES = {"prefill": Phase.PREFILL, "prompt": Phase.PREFILL, "0": Phase.PREFILL,
           "decode": Phase.DECODE, "generate": Phase.DECODE, "1": Phase.DECODE}  # fmt: skip
_HEADER = re.compile(rb"\"?[A-Za-z_][\w .\-\"]*([,;\t][\w .\-\"]+)+\s*")


def recognises(path: Path) -> bool:
    """Whether this is Parquet, or text whose first line names columns."""
    start = head(path, 4096)
    if start.startswith(b"PAR1"):
        return True
    line = start.split(b"\n", 1)[0].rstrip(b"\r")
    return _HEADER.fullmatch(line) is not None


def provenance(path: Path, *, map: str = "", prompt_tokens: str = "") -> dict[str, Any]:  # noqa: A002
    """The mapping that was used, and remarks."""
    found = mapping(path, map, _names(path))
    notes = []
    if not {"weights", "weight"} & set(found):
        notes.append("no combine weights in the source")
    if "phase" not in found and not prompt_tokens:
        notes.append(f"{NO_PHASES}: all are taken as generated; option prompt_tokens=N says more")
    return {"columns": {ours: "+".join(theirs) for ours, theirs in found.items()}, "notes": notes}


def read(path: Path, shape: ModelShape, *, map: str = "", prompt_tokens: str = "") -> Iterator[Block]:  # noqa: A002
    """Blocks of one sequence each; needs the mapped columns in memory."""
    found = mapping(path, map, _names(path))
    with decoding(path, "table"):
        table = _table(path, [name for theirs in found.values() for name in theirs])
        if not table.num_rows:
            raise bad(path, "rows", "at least one", "none")
        rows: Block = {}
        for ours, theirs in found.items():
            rows[ours] = _column(path, ours, [table.column(name) for name in theirs])
    count = table.num_rows
    rows.setdefault("seq", np.zeros(count, np.int64))
    if "expert" in rows:
        rows = _gathered(path, rows)
    for name in _LISTS:
        if name in rows and len(rows[name]) != len(rows["pos"]):
            raise bad(path, name, f"{len(rows['pos'])} rows", len(rows[name]))
    if prompt_tokens:
        prompt = whole_number(path, "prompt_tokens", prompt_tokens, 0)
        rows["phase"] = np.where(rows["pos"] < prompt, np.int8(Phase.PREFILL), np.int8(Phase.DECODE))
    yield from long_blocks(path, rows, shape, ("phase", "token"))


def mapping(path: Path, text: str, names: list[str]) -> dict[str, list[str]]:
    """Our column -> the file's columns.

    Raises:
        TraceError: a word that is no mapping, an unknown column on either side, or a needed one left out.
    """
    found = {name: [name] for name in _OURS if name in names}
    for word in filter(None, text.split(",")):
        ours, sign, theirs = (part.strip() for part in word.partition("="))
        if not sign or ours not in _OURS:
            raise bad(path, f"option map: {word!r}", f"column=theirs with {', '.join(_OURS)}", ours or "nothing", "")
        if theirs.endswith("*") and ours in _LISTS:
            numbered = {name: name[len(theirs) - 1 :] for name in names if name.startswith(theirs[:-1])}
            found[ours] = sorted(
                (n for n, rest in numbered.items() if rest.isdecimal()), key=lambda n: int(numbered[n])
            )
        else:
            found[ours] = [theirs]
        if not found[ours] or not set(found[ours]) <= set(names):
            raise bad(path, f"option map: {ours}", f"one of {', '.join(names)}", theirs, "")
    where = "columns" if text else "no importer knows this layout as it is: columns"
    for needed in ("pos", "layer"):
        if needed not in found:
            way_out = f"name it with option map={needed}=THEIRS"
            raise bad(path, where, f"one for {needed}", ", ".join(names), way_out)
    if ("experts" in found) == ("expert" in found):
        raise bad(path, where, "experts (all ids of a row) or expert (one)", ", ".join(names), "use option map=…")
    if "expert" in found and (extra := [name for name in ("weights", "scores") if name in found]):
        raise bad(path, f"columns: {extra[0]}", "weight, one per expert row", "a list", "map weight=… instead")
    return found


def _names(path: Path) -> list[str]:
    with decoding(path, "columns"):
        if head(path, 4) == b"PAR1":
            return list(pq.read_schema(path).names)
        line = head(path, 1 << 16).decode("utf-8").splitlines()[0]
        return [name.strip().strip('"') for name in line.split(_delimiter(line))]


def _delimiter(line: str) -> str:
    return max(",;\t", key=line.count)


def _table(path: Path, names: list[str]) -> pa.Table:
    if head(path, 4) == b"PAR1":
        return pq.read_table(path, columns=list(dict.fromkeys(names)), use_threads=False)
    from pyarrow import csv  # noqa: PLC0415 - not every import is of text

    line = head(path, 1 << 16).decode("utf-8").splitlines()[0]
    return csv.read_csv(
        path,
        read_options=csv.ReadOptions(column_names=_names(path), skip_rows=1, use_threads=False),
        parse_options=csv.ParseOptions(delimiter=_delimiter(line)),
        convert_options=csv.ConvertOptions(include_columns=list(dict.fromkeys(names)), strings_can_be_null=True),
    )


def _column(path: Path, ours: str, columns: list[Any]) -> np.ndarray:
    """One of our columns as numpy: [N], or [N, K] for lists."""
    arrays = [column.combine_chunks() for column in columns]
    arrays = [one.chunk(0) if isinstance(one, pa.ChunkedArray) else one for one in arrays]
    for column, array in zip(columns, arrays, strict=True):
        if array.null_count:
            row = int(np.argmax(np.asarray(column.is_null())))
            raise bad(path, f"row {row}: {ours}", "a value in every row", "null")
    if ours == "phase":
        return _phases(path, arrays[0])
    if ours in _LISTS:
        return _lists(path, ours, arrays)
    if ours == "seq" and not pa.types.is_integer(arrays[0].type):
        encoded = arrays[0] if isinstance(arrays[0], pa.DictionaryArray) else arrays[0].dictionary_encode()
        return values(encoded.indices).astype(np.int64)
    kinds = "fiu" if ours == "weight" else "iu"
    array = np.asarray(arrays[0])
    if array.dtype.kind not in kinds:
        raise bad(path, ours, "numbers" if ours == "weight" else "integers", arrays[0].type, "is the mapping right?")
    if ours not in ("weight", "seq") and not 0 <= int(array.min()) <= int(array.max()) < 1 << 31:
        raise bad(path, ours, "numbers from 0", f"{array.min()}..{array.max()}", "is the mapping right?")
    return array


def _phases(path: Path, array: Any) -> np.ndarray:
    if pa.types.is_integer(array.type):
        phase = np.asarray(array)
        if not 0 <= phase.min() <= phase.max() <= 1:
            raise bad(path, "phase", "0 (prefill) or 1 (decode)", f"{phase.min()}..{phase.max()}")
        return phase.astype(np.int8)
    phase = codes(array, list(_PHASES))
    if (phase < 0).any():
        row = int(np.argmax(phase < 0))
        raise bad(path, f"row {row}: phase", f"one of {', '.join(_PHASES)}", array[row].as_py())
    return np.array(list(_PHASES.values()), np.int8)[phase]


def _lists(path: Path, ours: str, arrays: list[Any]) -> np.ndarray:
    """[N, K] of a list column, of a column of texts, or of several plain columns."""
    first = arrays[0].type
    if pa.types.is_list(first) or pa.types.is_large_list(first) or pa.types.is_fixed_size_list(first):
        array = arrays[0].cast(pa.list_(first.value_type))
        lengths = np.diff(values(array.offsets))
        inner = flat(array)
        if inner.null_count:
            raise bad(path, ours, "numbers in every list", "null")
        numbers = np.asarray(inner)
    elif pa.types.is_string(first) or pa.types.is_large_string(first):
        texts = [re.sub(r"[\[\](){}|;]", " ", text).split() for text in arrays[0].to_pylist()]
        lengths = np.array([len(text) for text in texts])
        numbers = np.array([word for text in texts for word in text]).astype(
            np.int64 if ours == "experts" else np.float32
        )
    else:
        lengths = np.full(len(arrays[0]), len(arrays))
        numbers = np.stack([np.asarray(array) for array in arrays], axis=1).reshape(-1)
    if not len(lengths) or lengths[0] < 1 or (lengths != lengths[0]).any():
        row = int(np.argmax(lengths != lengths[0])) if len(lengths) else 0
        raise bad(path, f"row {row}: {ours}", f"{int(lengths[0])} values as in the first row", int(lengths[row]))
    if numbers.dtype.kind not in ("iu" if ours == "experts" else "iuf"):
        raise bad(path, ours, "integers" if ours == "experts" else "numbers", numbers.dtype, "is the mapping right?")
    if ours == "experts" and int(numbers.max()) >= 1 << 31:
        raise bad(path, ours, "expert ids", int(numbers.max()), "is the mapping right?")
    return numbers.reshape(len(lengths), -1)


def _gathered(path: Path, rows: Block) -> Block:
    """One row per token and layer out of one row per selected expert, by rank, else in file order."""
    count = len(rows["pos"])
    rank = rows.get("rank", np.arange(count))
    order = np.lexsort((rank, rows["layer"], rows["pos"], rows["seq"]))
    cell = np.stack([rows[name][order] for name in ("seq", "pos", "layer")])
    starts = np.flatnonzero(np.concatenate(([True], (np.diff(cell, axis=1) != 0).any(axis=0))))
    sizes = np.diff(np.append(starts, count))
    if (sizes != sizes[0]).any():
        place = int(np.argmax(sizes != sizes[0]))
        _, pos, layer = cell[:, starts[place]].tolist()
        raise bad(path, f"pos {pos}, layer {layer}", f"{sizes[0]} rows, one per expert", int(sizes[place]))
    gathered: Block = {
        name: rows[name][order][starts] for name in ("seq", "pos", "layer", "phase", "token") if name in rows
    }
    gathered["experts"] = rows["expert"][order].reshape(len(starts), -1)
    if "weight" in rows:
        gathered["weights"] = rows["weight"][order].reshape(len(starts), -1)
    by_appearance = np.argsort(order[starts], kind="stable")
    return {name: column[by_appearance] for name, column in gathered.items()}

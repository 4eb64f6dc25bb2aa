"""Plain Parquet or CSV with a column mapping: ``map`` =
pos=position,experts=topk_ids,layer=layer_id,….

Ours on the left, the file's on the right: seq, pos, phase, layer, experts, weights,
scores, token; or expert (one row per selected expert) with rank. ``experts=e*`` gathers
the columns e0, e1, …. Names that are the same need no mapping. In CSV a list is written
in one field, its numbers apart by blanks, semicolons or bars, brackets or not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from moesim.traces.format.arrow import codes, flat, values
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase
from moesim.traces.format.sorting import BATCH_ROWS, Appearance, Unordered
from moesim.traces.importers.readers.foreign import (
    NO_PHASES,
    NO_WEIGHTS,
    bad,
    decoding,
    finished,
    head,
    whole_number,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

GENERIC = True
OPTIONS = {
    "map": "our column=theirs, joined by commas",
    "prompt_tokens": "how many of the first tokens of every sequence are prompt",
}
_OURS = (
    "seq",
    "pos",
    "phase",
    "layer",
    "experts",
    "expert",
    "rank",
    "weights",
    "weight",
    "scores",
    "token",
)
_LISTS = ("experts", "weights", "scores", *PREDICTION_COLUMNS)
_BLOCK_BYTES = 8 << 20
_PHASES = {
    "prefill": Phase.PREFILL,
    "prompt": Phase.PREFILL,
    "0": Phase.PREFILL,
    "decode": Phase.DECODE,
    "generate": Phase.DECODE,
    "1": Phase.DECODE,
}
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
        notes.append(NO_WEIGHTS)
    if "phase" not in found and not prompt_tokens:
        notes.append(
            f"{NO_PHASES}: all are taken as generated; option prompt_tokens=N says more"
        )
    return {
        "columns": {ours: "+".join(theirs) for ours, theirs in found.items()},
        "notes": notes,
    }


def read(
    path: Path,
    shape: ModelShape,
    *,
    map: str = "",  # noqa: A002 - the option's name
    prompt_tokens: str = "",
) -> Unordered:
    """The mapped columns."""
    return unordered(path, shape, mapping(path, map, _names(path)), prompt_tokens)


def unordered(
    path: Path, shape: ModelShape, found: dict[str, list[str]], prompt_tokens: str = ""
) -> Unordered:
    """The rows of a table: our column -> the file's columns."""
    prompt = (
        whole_number(path, "prompt_tokens", prompt_tokens, 0) if prompt_tokens else None
    )

    def finish(block: Block) -> Block:
        if "expert" in block:
            block = _gathered(path, block)
        return finished(path, shape, block, ("phase", "token"))

    return Unordered(lambda: _pieces(path, found, prompt), finish)


def _pieces(
    path: Path, found: dict[str, list[str]], prompt: int | None
) -> Iterator[Block]:
    """The file's rows, some at a time."""
    base = 0
    widths = dict[str, int]()
    sequences = Appearance()
    for batch in _batches(
        path, list(dict.fromkeys(name for theirs in found.values() for name in theirs))
    ):
        if not batch.num_rows:
            continue
        rows: Block = {}
        for ours, theirs in found.items():
            columns = [batch.column(name) for name in theirs]
            rows[ours] = (
                _sequences(path, base, columns, sequences)
                if ours == "seq"
                else _column(path, base, ours, columns)
            )
            if ours in _LISTS and rows[ours].shape[1] != widths.setdefault(
                ours, rows[ours].shape[1]
            ):
                raise bad(
                    path,
                    f"row {base}: {ours}",
                    f"{widths[ours]} values as in the first row",
                    rows[ours].shape[1],
                )
        rows.setdefault("seq", np.zeros(batch.num_rows, np.int32))
        if "expert" in rows:
            rows.setdefault("rank", np.arange(base, base + batch.num_rows))
        if prompt is not None:
            rows["phase"] = np.where(
                rows["pos"] < prompt, np.int8(Phase.PREFILL), np.int8(Phase.DECODE)
            )
        yield rows
        base += batch.num_rows
    if not base:
        raise bad(path, "rows", "at least one", "none")


def mapping(path: Path, text: str, names: list[str]) -> dict[str, list[str]]:
    """Our column -> the file's columns.

    Raises:
        TraceError: a word that is no mapping, an unknown column on either side, or a
            needed one left out.
    """
    found = {name: [name] for name in _OURS if name in names}
    for word in filter(None, text.split(",")):
        ours, sign, theirs = (part.strip() for part in word.partition("="))
        if not sign or ours not in _OURS:
            raise bad(
                path,
                f"option map: {word!r}",
                f"column=theirs with {', '.join(_OURS)}",
                ours or "nothing",
                "",
            )
        if theirs.endswith("*") and ours in _LISTS:
            numbered = {
                name: name[len(theirs) - 1 :]
                for name in names
                if name.startswith(theirs[:-1])
            }
            found[ours] = sorted(
                (n for n, rest in numbered.items() if rest.isdecimal()),
                key=lambda n: int(numbered[n]),
            )
        else:
            found[ours] = [theirs]
        if not found[ours] or not set(found[ours]) <= set(names):
            raise bad(
                path, f"option map: {ours}", f"one of {', '.join(names)}", theirs, ""
            )
    where = "columns" if text else "no importer knows this layout as it is: columns"
    for needed in ("pos", "layer"):
        if needed not in found:
            way_out = f"name it with option map={needed}=THEIRS"
            raise bad(path, where, f"one for {needed}", ", ".join(names), way_out)
    if ("experts" in found) == ("expert" in found):
        raise bad(
            path,
            where,
            "experts (all ids of a row) or expert (one)",
            ", ".join(names),
            "use option map=…",
        )
    if "expert" in found and (
        extra := [name for name in ("weights", "scores") if name in found]
    ):
        raise bad(
            path,
            f"columns: {extra[0]}",
            "weight, one per expert row",
            "a list",
            "map weight=… instead",
        )
    return found


def _names(path: Path) -> list[str]:
    with decoding(path, "columns"):
        if head(path, 4) == b"PAR1":
            return list(pq.read_schema(path).names)
        line = head(path, 1 << 16).decode("utf-8").splitlines()[0]
        return [name.strip().strip('"') for name in line.split(_delimiter(line))]


def _delimiter(line: str) -> str:
    return max(",;\t", key=line.count)


def _batches(path: Path, names: list[str]) -> Iterator[pa.RecordBatch]:
    """The columns `names` of the file, some rows at a time."""
    if head(path, 4) == b"PAR1":
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield from file.iter_batches(BATCH_ROWS, columns=names, use_threads=False)
        return
    from pyarrow import csv  # noqa: PLC0415 - not every import is of text

    line = head(path, 1 << 16).decode("utf-8").splitlines()[0]
    yield from csv.open_csv(
        path,
        read_options=csv.ReadOptions(
            column_names=_names(path),
            skip_rows=1,
            use_threads=False,
            block_size=_BLOCK_BYTES,
        ),
        parse_options=csv.ParseOptions(delimiter=_delimiter(line)),
        convert_options=csv.ConvertOptions(
            include_columns=names, strings_can_be_null=True
        ),
    )


def _sequences(
    path: Path, base: int, columns: list[Any], sequences: Appearance
) -> np.ndarray:
    """Numbers of sequences, whatever their names."""
    array = _whole(path, base, "seq", columns[0])
    if pa.types.is_integer(array.type):
        return sequences.of_numbers(np.asarray(array))
    encoded = (
        array if isinstance(array, pa.DictionaryArray) else array.dictionary_encode()
    )
    return sequences.of_labels(
        encoded.dictionary.to_pylist(), np.asarray(encoded.indices)
    )


def _whole(path: Path, base: int, ours: str, array: Any) -> Any:
    """The array, which must have no null."""
    if array.null_count:
        row = int(np.argmax(np.asarray(array.is_null())))
        raise bad(path, f"row {base + row}: {ours}", "a value in every row", "null")
    return array


def _column(path: Path, base: int, ours: str, columns: list[Any]) -> np.ndarray:
    """One of our columns as numpy: [N], or [N, K] for lists."""
    arrays = [_whole(path, base, ours, array) for array in columns]
    if ours == "phase":
        return _phases(path, base, arrays[0])
    if ours in _LISTS:
        return _lists(path, base, ours, arrays)
    kinds = "fiu" if ours == "weight" else "iu"
    array = np.asarray(arrays[0])
    if array.dtype.kind not in kinds:
        raise bad(
            path,
            ours,
            "numbers" if ours == "weight" else "integers",
            arrays[0].type,
            "is the mapping right?",
        )
    if ours == "weight":
        return array.astype(np.float32)
    top = 1 << (16 if ours == "expert" else 63 if ours == "rank" else 31)
    if not 0 <= int(array.min()) <= int(array.max()) < top:
        raise bad(
            path,
            ours,
            "numbers from 0",
            f"{array.min()}..{array.max()}",
            "is the mapping right?",
        )
    return array.astype(
        np.int64 if ours == "rank" else np.uint16 if ours == "expert" else np.int32
    )


def _phases(path: Path, base: int, array: Any) -> np.ndarray:
    if pa.types.is_integer(array.type):
        phase = np.asarray(array)
        if not 0 <= phase.min() <= phase.max() <= 1:
            raise bad(
                path,
                "phase",
                "0 (prefill) or 1 (decode)",
                f"{phase.min()}..{phase.max()}",
            )
        return phase.astype(np.int8)
    phase = codes(array, list(_PHASES))
    if (phase < 0).any():
        row = int(np.argmax(phase < 0))
        raise bad(
            path,
            f"row {base + row}: phase",
            f"one of {', '.join(_PHASES)}",
            array[row].as_py(),
        )
    return np.array(list(_PHASES.values()), np.int8)[phase]


def _lists(path: Path, base: int, ours: str, arrays: list[Any]) -> np.ndarray:
    """[N, K] of a list column, of a column of texts, or of several plain columns."""
    first = arrays[0].type
    if (
        pa.types.is_list(first)
        or pa.types.is_large_list(first)
        or pa.types.is_fixed_size_list(first)
    ):
        lengths, numbers = _of_lists(
            path, ours, arrays[0].cast(pa.list_(first.value_type))
        )
    elif pa.types.is_string(first) or pa.types.is_large_string(first):
        lengths, numbers = _of_lists(
            path, ours, _split(arrays[0], "int64" if ours == "experts" else "float32")
        )
    else:
        lengths = np.full(len(arrays[0]), len(arrays))
        numbers = np.stack([np.asarray(array) for array in arrays], axis=1).reshape(-1)
    if lengths[0] < 1 or (lengths != lengths[0]).any():
        row = int(np.argmax(lengths != lengths[0]))
        expected = f"{int(lengths[0])} values as in the first row"
        raise bad(path, f"row {base + row}: {ours}", expected, int(lengths[row]))
    if numbers.dtype.kind not in ("iu" if ours == "experts" else "iuf"):
        raise bad(
            path,
            ours,
            "integers" if ours == "experts" else "numbers",
            numbers.dtype,
            "is the mapping right?",
        )
    if ours != "experts":
        kind = np.float16 if numbers.dtype == np.float16 else np.float32
        return numbers.astype(kind, copy=False).reshape(len(lengths), -1)
    if not 0 <= int(numbers.min()) <= int(numbers.max()) < 1 << 16:
        raise bad(
            path,
            ours,
            "expert ids",
            f"{numbers.min()}..{numbers.max()}",
            "is the mapping right?",
        )
    return numbers.astype(np.uint16, copy=False).reshape(len(lengths), -1)


def _of_lists(path: Path, ours: str, array: Any) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and all values of a list array."""
    inner = flat(array)
    if inner.null_count:
        raise bad(path, ours, "numbers in every list", "null")
    return np.diff(values(array.offsets)), np.asarray(inner)


def _split(array: Any, kind: str) -> Any:
    """Texts as lists of numbers; words that are none raise as Arrow does."""
    from pyarrow import compute  # noqa: PLC0415 - not every import has lists in texts

    plain = compute.utf8_trim_whitespace(
        compute.replace_substring_regex(array, r"[\[\](){}|;\s]+", " ")
    )
    words = compute.split_pattern(plain.cast(pa.string()), " ")
    return pa.ListArray.from_arrays(words.offsets, words.values.cast(kind))


def _gathered(path: Path, rows: Block) -> Block:
    """One row per token and layer out of one row per selected expert; rows of one
    sequence, sorted.
    """
    count = len(rows["pos"])
    change = (np.diff(rows["pos"]) != 0) | (np.diff(rows["layer"]) != 0)
    starts = np.flatnonzero(np.concatenate(([True], change)))
    sizes = np.diff(np.append(starts, count))
    if (sizes != sizes[0]).any():
        place = starts[int(np.argmax(sizes != sizes[0]))]
        size = int(sizes[np.searchsorted(starts, place)])
        where = f"pos {rows['pos'][place]}, layer {rows['layer'][place]}"
        raise bad(path, where, f"{sizes[0]} rows, one per expert", size)
    gathered: Block = {
        name: rows[name][starts]
        for name in ("seq", "pos", "layer", "phase", "token")
        if name in rows
    }
    gathered["experts"] = rows["expert"].reshape(len(starts), -1)
    if "weight" in rows:
        gathered["weights"] = rows["weight"].reshape(len(starts), -1)
    return gathered

"""Plain Parquet or CSV with a column mapping: ``map`` =
pos=position,experts=topk_ids,layer=layer_id,….

Ours on the left, the file's on the right: seq, pos, phase, layer, experts, weights,
scores, token; or expert (one row per selected expert) with rank. ``experts=e*`` gathers
the columns e0, e1, …. Names that are the same need no mapping. In CSV a list is written
in one field, its numbers apart by blanks, semicolons, bars or (quoted) commas, brackets
or not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from moesim.traces.format.parquet import codes, flat, open_parquet, read_schema, values
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase
from moesim.traces.format.sorting import BATCH_ROWS, Appearance, Unordered
from moesim.traces.importers.readers.foreign import (
    NAMES,
    NO_WEIGHTS,
    PROMPT_TOKENS,
    PROMPT_TOKENS_NOTE,
    decoding,
    layout_error,
    named_by,
    prompt_length,
)
from moesim.traces.importers.readers.sequence_rows import finished
from moesim.traces.importers.readers.text import head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]
    # Our column -> the file's columns.
    Mapping = dict[str, list[str]]

GENERIC = True
OPTIONS = {"map": "our column=theirs, joined by commas", "prompt_tokens": PROMPT_TOKENS}
PARTS = ("layer_files",)
"""What `import_trace` says beside options: a file for each MoE layer, as JSON list."""


_OUR_COLUMNS = (
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
# Numbers of a column are below this; of the others below 2**31.
_LIMITS = {"expert": 1 << 16, "rank": 1 << 63}
_DTYPES = {"expert": np.uint16, "rank": np.int64}
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
_WRONG_MAPPING = "is the mapping right?"


def recognises(path: Path) -> bool:
    """Whether this is Parquet, or text whose first line names columns."""
    start = head(path, 4096)
    if start.startswith(b"PAR1"):
        return True

    first_line = start.split(b"\n", 1)[0].rstrip(b"\r")
    return _HEADER.fullmatch(first_line) is not None


def provenance(
    path: Path,
    *,
    map: str = "",  # noqa: A002 - the option's name
    prompt_tokens: str = "",
    layer_files: str = "",
) -> dict[str, Any]:
    """The mapping that was used, and remarks."""
    used = mapping(path, map, _names(path), by_layer=bool(layer_files))

    notes = []
    if "weights" not in used and "weight" not in used:
        notes.append(NO_WEIGHTS)
    if "phase" not in used and not prompt_tokens:
        notes.append(PROMPT_TOKENS_NOTE)

    return {
        "columns": {name: "+".join(sources) for name, sources in used.items()},
        "notes": notes,
    }


def read(
    path: Path,
    shape: ModelShape,
    *,
    map: str = "",  # noqa: A002 - the option's name
    prompt_tokens: str = "",
    layer_files: str = "",
) -> Unordered:
    """The mapped columns; of several files, one for each MoE layer."""
    columns = mapping(path, map, _names(path), by_layer=bool(layer_files))
    if not layer_files:
        return unordered(path, shape, columns, prompt_tokens)

    files = [Path(file) for file in json.loads(layer_files)]
    prompt = prompt_length(path, prompt_tokens)
    return Unordered(
        lambda: _pieces_by_layer(files, columns),
        lambda block: _finished(path, shape, block, prompt),
    )


def unordered(
    path: Path,
    shape: ModelShape,
    columns: Mapping,
    prompt_tokens: str = "",
    *,
    keeps_numbers: bool = False,
) -> Unordered:
    """Return the rows of a table.

    Args:
        path: the file.
        shape: the model.
        columns: our column -> the file's columns.
        prompt_tokens: how many of the first tokens of every sequence are prompt; empty
            where the file says so, or it is not known.
        keeps_numbers: sequences have the file's numbers, not those of appearance.
    """
    prompt = prompt_length(path, prompt_tokens)

    return Unordered(
        lambda: pieces(path, columns, _Counts(keeps_numbers=keeps_numbers)),
        lambda block: _finished(path, shape, block, prompt),
    )


def _finished(path: Path, shape: ModelShape, block: Block, prompt: int | None) -> Block:
    """A whole sequence, its layers numbered as MoE layers."""
    if "expert" in block:
        block = _gathered(path, block)
    return finished(path, shape, block, ("phase", "token"), prompt)


# -- mapping ---------------------------------------------------------------------------


def mapping(
    path: Path, text: str, names: list[str], *, by_layer: bool = False
) -> Mapping:
    """Return our column -> the file's columns.

    Args:
        path: the file, for errors.
        text: words ``ours=theirs``, joined by commas.
        names: the file's columns.
        by_layer: there is a file for each layer, so neither layers nor positions need a
            column.

    Raises:
        TraceError: a word that is no mapping, an unknown column on either side, or a
            needed one left out.
    """
    # What has a known name already needs no word; a word may still say otherwise.
    columns = _known(names)
    words = named_by(path, text, _OUR_COLUMNS)
    # One of the two kinds of rows: a word for one excludes the other.
    for name, other in (("expert", "experts"), ("experts", "expert")):
        if name in words:
            columns.pop(other, None)
    for name, source in words.items():
        is_pattern = source.endswith("*") and name in _LISTS
        columns[name] = _numbered(names, source[:-1]) if is_pattern else [source]
        if not columns[name] or not set(columns[name]) <= set(names):
            expected = f"one of {', '.join(names)}"
            raise layout_error(path, f"--map: {name}", expected, source, "")

    place = "columns" if text else "no importer knows this layout as it is: columns"
    needed = () if by_layer else ("pos", "layer")
    _check_complete(path, place, columns, names, needed)
    return columns


def _known(names: list[str]) -> Mapping:
    """Our column -> the file's column of a name that is known."""
    columns = {name: [name] for name in _OUR_COLUMNS if name in names}
    # One row per expert has an id of its own, whatever lists there are beside it.
    generic = [name for name in NAMES if name != "experts" or "expert" not in columns]
    for name in generic:
        known = [other for other in NAMES[name] if other in names]
        if known:
            columns.setdefault(name, known[:1])
    return columns


def _numbered(names: list[str], prefix: str) -> list[str]:
    """Columns such as e0, e1, …, by their numbers."""
    numbers = {
        name: name.removeprefix(prefix) for name in names if name.startswith(prefix)
    }
    numbered = [name for name, rest in numbers.items() if rest.isdecimal()]
    return sorted(numbered, key=lambda name: int(numbers[name]))


def _check_complete(
    path: Path, place: str, columns: Mapping, names: list[str], needed: tuple[str, ...]
) -> None:
    actual = ", ".join(names)
    for name in needed:
        if name not in columns:
            way_out = f"name it with --map {name}=THEIRS"
            raise layout_error(path, place, f"one for {name}", actual, way_out)

    # Both would contradict each other, and without either there is no routing.
    if ("experts" in columns) == ("expert" in columns):
        expected = "experts (all ids of a row) or expert (one)"
        raise layout_error(path, place, expected, actual, "use --map …")

    # A list of weights cannot be shared out to rows of one expert each.
    if "expert" not in columns:
        return
    for name in ("weights", "scores"):
        if name in columns:
            raise layout_error(
                path,
                f"columns: {name}",
                "weight, one per expert row",
                "a list",
                "map weight=… instead",
            )


# -- the file --------------------------------------------------------------------------


def _names(path: Path) -> list[str]:
    """The file's columns."""
    with decoding(path, "columns"):
        if head(path, 4) == b"PAR1":
            return list(read_schema(path).names)

        # Arrow would take the names apart too, but only while reading the rows.
        line = _header_line(path)
        return [name.strip().strip('"') for name in line.split(_delimiter(line))]


def _header_line(path: Path) -> str:
    return head(path, 1 << 16).decode("utf-8").splitlines()[0]


def _delimiter(line: str) -> str:
    # Spreadsheets write semicolons where the comma is the decimal point.
    return max(",;\t", key=line.count)


def batches(path: Path, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Read the columns `names` of the file, some rows at a time."""
    if head(path, 4) == b"PAR1":
        # A name of a megabyte in every row is one name.
        schema = read_schema(path)
        texts = [name for name in names if pa.types.is_string(schema.field(name).type)]
        with open_parquet(path, encoded=texts) as file:
            yield from file.iter_batches(BATCH_ROWS, columns=names, use_threads=False)
        return

    from pyarrow import csv  # noqa: PLC0415 - not every import is of text

    yield from csv.open_csv(
        path,
        read_options=csv.ReadOptions(
            column_names=_names(path),
            skip_rows=1,
            use_threads=False,
            block_size=_BLOCK_BYTES,
        ),
        parse_options=csv.ParseOptions(delimiter=_delimiter(_header_line(path))),
        convert_options=csv.ConvertOptions(
            include_columns=names, strings_can_be_null=True
        ),
    )


def _pieces_by_layer(files: list[Path], columns: Mapping) -> Iterator[Block]:
    """Rows of the files one after the other, a layer each; a sequence has the same
    name in all of them.
    """
    rows_of_first = None
    sequences = Appearance()
    for layer, file in enumerate(files):
        rows = 0
        for block in pieces(file, columns, _Counts(sequences)):
            count = len(block["seq"])
            block["layer"] = np.full(count, layer, np.int32)
            rows += count
            yield block
        rows_of_first = rows if rows_of_first is None else rows_of_first
        if rows != rows_of_first:
            expected = f"{rows_of_first} as in {files[0].name}"
            raise layout_error(file, "rows", expected, rows, "one row per token")


class _Counts:
    """Numbers of sequences, and how many rows of each a file had so far.

    Args:
        sequences: numbers them by their first row, over several files.
        keeps_numbers: they keep the numbers that the file gives them.
    """

    def __init__(
        self, sequences: Appearance | None = None, *, keeps_numbers: bool = False
    ) -> None:
        self.sequences = Appearance() if sequences is None else sequences
        self.keeps_numbers = keeps_numbers
        self._rows = np.zeros(0, np.int64)

    def positions(self, seq: np.ndarray) -> np.ndarray:
        """Return for each row [N] how many rows its sequence had before it."""
        if not len(seq):
            return np.zeros(0, np.int64)
        sequences = int(seq.max()) + 1
        longer = np.zeros(max(sequences, len(self._rows)), np.int64)
        longer[: len(self._rows)] = self._rows
        self._rows = longer

        order = np.argsort(seq, kind="stable")
        counts = np.bincount(seq, minlength=len(longer))
        starts = np.cumsum(counts) - counts
        before = np.empty(len(seq), np.int64)
        before[order] = np.arange(len(seq)) - starts[seq[order]]
        before += longer[seq]
        self._rows += counts
        return before


def pieces(
    path: Path, columns: Mapping, counts: _Counts | None = None
) -> Iterator[Block]:
    """Read the file's rows, some at a time.

    Without a column for them, positions count the rows of a sequence.
    """
    counts = counts or _Counts()
    first_row = 0
    widths: dict[str, int] = {}

    # A column may serve two of ours, and is read once.
    needed = dict.fromkeys(name for sources in columns.values() for name in sources)
    for batch in batches(path, list(needed)):
        if not batch.num_rows:
            continue

        rows: Block = {}
        for name, sources in columns.items():
            arrays = [batch.column(name) for name in sources]
            if name == "seq" and counts.keeps_numbers:
                rows[name] = _column(path, first_row, name, arrays)
            elif name == "seq":
                rows[name] = _sequences(path, first_row, arrays[0], counts.sequences)
            else:
                rows[name] = _column(path, first_row, name, arrays)
            if name in _LISTS:
                _check_width(path, first_row, name, rows[name], widths)

        rows.setdefault("seq", np.zeros(batch.num_rows, np.int32))
        if "expert" in rows:
            # Without a rank, the experts of a token are as the file orders them.
            order = np.arange(first_row, first_row + batch.num_rows)
            rows.setdefault("rank", order)
        if "pos" not in rows:
            rows["pos"] = counts.positions(rows["seq"])
        yield rows
        first_row += batch.num_rows

    if not first_row:
        raise layout_error(path, "rows", "at least one", "none")


def _check_width(
    path: Path, first_row: int, name: str, column: np.ndarray, widths: dict[str, int]
) -> None:
    """Whether a list column is as wide as in the first rows, which `widths` keeps."""
    width = widths.setdefault(name, column.shape[1])
    if column.shape[1] != width:
        place = f"row {first_row}: {name}"
        expected = f"{width} values as in the first row"
        raise layout_error(path, place, expected, column.shape[1])


# -- columns ---------------------------------------------------------------------------


def _sequences(
    path: Path, first_row: int, column: Any, sequences: Appearance
) -> np.ndarray:
    """Numbers of sequences, whatever their names."""
    array = _without_null(path, first_row, "seq", column)
    if pa.types.is_integer(array.type):
        return sequences.of_numbers(np.asarray(array))

    is_encoded = isinstance(array, pa.DictionaryArray)
    encoded = array if is_encoded else array.dictionary_encode()
    labels = encoded.dictionary.to_pylist()
    return sequences.of_labels(labels, np.asarray(encoded.indices))


def _without_null(path: Path, first_row: int, name: str, array: Any) -> Any:
    """The array itself, which must have no null."""
    if array.null_count:
        row = first_row + int(np.argmax(np.asarray(array.is_null())))
        raise layout_error(path, f"row {row}: {name}", "a value in every row", "null")

    return array


def _column(path: Path, first_row: int, name: str, columns: list[Any]) -> np.ndarray:
    """One of our columns as numpy: [N], or [N, K] for lists."""
    arrays = [_without_null(path, first_row, name, array) for array in columns]
    if name == "phase":
        return _phases(path, first_row, arrays[0])
    if name in _LISTS:
        return _lists(path, first_row, name, arrays)

    array = np.asarray(arrays[0])
    is_weight = name == "weight"
    if array.dtype.kind not in ("fiu" if is_weight else "iu"):
        expected = "numbers" if is_weight else "integers"
        raise layout_error(path, name, expected, arrays[0].type, _WRONG_MAPPING)
    if is_weight:
        return array.astype(np.float32)

    limit = _LIMITS.get(name, 1 << 31)
    if not 0 <= int(array.min()) <= int(array.max()) < limit:
        actual = f"{array.min()}..{array.max()}"
        raise layout_error(path, name, "numbers from 0", actual, _WRONG_MAPPING)
    return array.astype(_DTYPES.get(name, np.int32))


def _phases(path: Path, first_row: int, array: Any) -> np.ndarray:
    """int8 [N] of names, or of 0 and 1."""
    if pa.types.is_integer(array.type):
        phase = np.asarray(array)
        if not 0 <= phase.min() <= phase.max() <= 1:
            actual = f"{phase.min()}..{phase.max()}"
            raise layout_error(path, "phase", "0 (prefill) or 1 (decode)", actual)
        return phase.astype(np.int8)

    known = codes(array, list(_PHASES))
    if (known < 0).any():
        row = int(np.argmax(known < 0))
        raise layout_error(
            path,
            f"row {first_row + row}: phase",
            f"one of {', '.join(_PHASES)}",
            array[row].as_py(),
        )
    return np.array(list(_PHASES.values()), np.int8)[known]


def _lists(path: Path, first_row: int, name: str, arrays: list[Any]) -> np.ndarray:
    """[N, K] of a list column, of a column of texts, or of several plain columns."""
    lengths, cells = _list_cells(path, name, arrays)

    width = int(lengths[0])
    if width < 1 or (lengths != width).any():
        row = int(np.argmax(lengths != width))
        place = f"row {first_row + row}: {name}"
        expected = f"{width} values as in the first row"
        raise layout_error(path, place, expected, int(lengths[row]))

    is_ids = name == "experts"
    if cells.dtype.kind not in ("iu" if is_ids else "iuf"):
        expected = "integers" if is_ids else "numbers"
        raise layout_error(path, name, expected, cells.dtype, _WRONG_MAPPING)

    if not is_ids:
        # 16-bit floats stay what they are: a way through 32 bits changes nothing.
        kind = np.float16 if cells.dtype == np.float16 else np.float32
        return cells.astype(kind, copy=False).reshape(len(lengths), -1)

    if not 0 <= int(cells.min()) <= int(cells.max()) < 1 << 16:
        actual = f"{cells.min()}..{cells.max()}"
        raise layout_error(path, name, "expert ids", actual, _WRONG_MAPPING)
    return cells.astype(np.uint16, copy=False).reshape(len(lengths), -1)


def _list_cells(
    path: Path, name: str, arrays: list[Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Length of each row's list, and the values of all lists."""
    array = arrays[0]
    kind = array.type
    is_list = (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
    )
    if is_list:
        return _of_lists(path, name, array.cast(pa.list_(kind.value_type)))

    if pa.types.is_dictionary(kind):
        array = array.cast(kind.value_type)
        kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        numbers = "int64" if name == "experts" else "float32"
        return _of_lists(path, name, _split(array, numbers))

    columns = [np.asarray(column) for column in arrays]
    lengths = np.full(len(array), len(arrays))
    return lengths, np.stack(columns, axis=1).reshape(-1)


def _of_lists(path: Path, name: str, array: Any) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and all values of a list array."""
    inner = flat(array)
    if inner.null_count:
        raise layout_error(path, name, "numbers in every list", "null")

    return np.diff(values(array.offsets)), np.asarray(inner)


def _split(array: Any, kind: str) -> Any:
    """Texts as lists of numbers; words that are none raise as Arrow does."""
    from pyarrow import compute  # noqa: PLC0415 - not every import has lists in texts

    blanks = compute.replace_substring_regex(array, r"[\[\](){}|;,\s]+", " ")
    plain = compute.utf8_trim_whitespace(blanks)
    split = compute.split_pattern(plain.cast(pa.string()), " ")
    return pa.ListArray.from_arrays(split.offsets, split.values.cast(kind))


def _gathered(path: Path, rows: Block) -> Block:
    """One row per token and layer out of one row per selected expert; rows of one
    sequence, sorted.
    """
    pos = rows["pos"]
    layer = rows["layer"]
    # Sorted by rank as well, so the experts of a cell are best first.
    change = (np.diff(pos) != 0) | (np.diff(layer) != 0)
    starts = np.flatnonzero(np.concatenate(([True], change)))
    sizes = np.diff(np.append(starts, len(pos)))

    wrong = sizes != sizes[0]
    if wrong.any():
        cell = int(np.argmax(wrong))
        place = f"pos {pos[starts[cell]]}, layer {layer[starts[cell]]}"
        expected = f"{sizes[0]} rows, one per expert"
        raise layout_error(path, place, expected, int(sizes[cell]))

    names = ("seq", "pos", "layer", "phase", "token")
    gathered: Block = {name: rows[name][starts] for name in names if name in rows}
    gathered["experts"] = rows["expert"].reshape(len(starts), -1)
    if "weight" in rows:
        gathered["weights"] = rows["weight"].reshape(len(starts), -1)
    return gathered

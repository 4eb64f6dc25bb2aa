"""Plain Parquet or CSV with a column mapping: ``map`` =
pos=position,experts=topk_ids,layer=layer_id,….

Ours on the left, the file's on the right: seq, pos, phase, layer, experts, weights,
scores, token; or expert (one row per selected expert) with rank. ``experts=e*`` gathers
the columns e0, e1, …, as does no mapping at all. Names that are the same need no
mapping. In CSV a list is written in one field, its numbers apart by blanks, semicolons,
bars or (quoted) commas, brackets or not.
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
    RESTARTS,
    TWICE,
    are_passes,
    decoding,
    layout_error,
    named_by,
    prompt_length,
)
from moesim.traces.importers.readers.sequence_rows import finished, of_passes
from moesim.traces.importers.readers.text import head, part_of, sections

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.base.errors import TraceError
    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]
    # Our column -> the file's columns.
    Mapping = dict[str, list[str]]

GENERIC = True
OPTIONS = {
    "map": "our column=theirs, joined by commas",
    "prompt_tokens": PROMPT_TOKENS,
    "restarts": RESTARTS,
}
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


def provenance(path: Path, **given: str) -> dict[str, Any]:
    """The mapping that was used, and remarks."""
    used = mapping(path, given, _names(path))

    notes = []
    if "weights" not in used and "weight" not in used:
        notes.append(NO_WEIGHTS)
    if not are_passes(path, given) and not {"phase", "prompt_tokens"} & {*used, *given}:
        notes.append(PROMPT_TOKENS_NOTE)

    return {
        "columns": {name: "+".join(sources) for name, sources in used.items()},
        "notes": notes,
    }


def read(path: Path, shape: ModelShape, **given: str) -> Unordered:
    """The mapped columns; of several files, one for each MoE layer."""
    columns = mapping(path, given, _names(path))
    prompt = prompt_length(path, given)
    if are_passes(path, given):
        return Unordered(
            lambda: of_passes(path, pieces(path, columns)),
            lambda block: _finished(path, shape, block, prompt),
        )
    if "layer_files" not in given:
        return unordered(path, shape, columns, prompt)

    files = [Path(file) for file in json.loads(given["layer_files"])]
    return Unordered(
        lambda: _pieces_by_layer(files, columns),
        lambda block: _finished(path, shape, block, prompt),
    )


def unordered(
    path: Path,
    shape: ModelShape,
    columns: Mapping,
    prompt: int | None = None,
    *,
    keeps_numbers: bool = False,
) -> Unordered:
    """Return the rows of a table.

    Args:
        path: the file.
        shape: the model.
        columns: our column -> the file's columns.
        prompt: how many of the first tokens of every sequence are prompt; None where
            the file says so, or it is not known.
        keeps_numbers: sequences have the file's numbers, not those of appearance.
    """
    return Unordered(
        lambda: pieces(path, columns, _Counts(keeps_numbers=keeps_numbers)),
        lambda block: _finished(path, shape, block, prompt),
    )


def _finished(path: Path, shape: ModelShape, block: Block, prompt: int | None) -> Block:
    """A whole sequence, its layers numbered as MoE layers."""
    if "expert" in block:
        block = _gathered(path, block)
    return finished(path, shape, block, ("phase", "token"), prompt, TWICE)


# -- mapping ---------------------------------------------------------------------------


def mapping(path: Path, given: dict[str, str], names: list[str]) -> Mapping:
    """Return our column -> the file's columns.

    Args:
        path: the file, for errors.
        given: options: ``map``, words ``ours=theirs`` joined by commas, and
            ``layer_files``, which spare columns for layers and positions.
        names: the file's columns.

    Raises:
        TraceError: a word that is no mapping, an unknown column on either side, or a
            needed one left out.
    """
    # What has a known name already needs no word; a word may still say otherwise.
    columns = _known(names)
    ranks = _numbered(names, "e")
    if ranks and "map" not in given and not {"experts", "expert"} & columns.keys():
        columns["experts"] = ranks
    words = named_by(path, given, _OUR_COLUMNS)
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

    place = (
        "columns"
        if "map" in given
        else "no importer knows this layout as it is: columns"
    )
    needed = () if "layer_files" in given else ("pos", "layer")
    _check_complete(path, place, columns, names, needed)
    return columns


def _known(names: list[str]) -> Mapping:
    """Our column -> the file's column of a name that is known."""
    columns = {name: [name] for name in _OUR_COLUMNS if name in names}
    # Without a position, a token's number is one.
    if "token" in columns and not any(name in names for name in NAMES["pos"]):
        columns["pos"] = columns.pop("token")
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


def _parts(path: Path) -> list[tuple[int, int]]:
    """The rows below each header of a text: people join files."""
    if head(path, 4) == b"PAR1":
        return [(0, 0)]
    return sections(path, _header_line(path).strip().encode()) or [(0, 0)]


def batches(
    path: Path, names: list[str], part: tuple[int, int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Read the columns `names` of the file, or of a part of a text, some rows at a
    time.
    """
    if head(path, 4) == b"PAR1":
        # A name of a megabyte in every row is one name.
        schema = read_schema(path)
        texts = [name for name in names if pa.types.is_string(schema.field(name).type)]
        with open_parquet(path, encoded=texts) as file:
            yield from file.iter_batches(BATCH_ROWS, columns=names, use_threads=False)
        return

    from pyarrow import csv  # noqa: PLC0415 - not every import is of text

    yield from csv.open_csv(
        path if part is None else part_of(path, *part),
        read_options=csv.ReadOptions(
            column_names=_names(path),
            skip_rows=int(part is None),
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
    reading = _Columns(path, counts)

    # A column may serve two of ours, and is read once.
    needed = dict.fromkeys(name for sources in columns.values() for name in sources)
    sequences = 0
    parts = _parts(path)
    for part in parts:
        first = sequences
        if first:
            # The same name is another sequence in another file.
            counts.sequences = Appearance()
        for batch in batches(path, list(needed), part if len(parts) > 1 else None):
            if not batch.num_rows:
                continue
            rows = _rows_of(batch, columns, reading, counts)
            rows["seq"] += np.int32(first)
            sequences = max(sequences, int(rows["seq"].max()) + 1)
            yield rows

    if not reading.first_row:
        raise layout_error(path, "rows", "at least one", "none")


def _rows_of(
    batch: pa.RecordBatch, columns: Mapping, reading: _Columns, counts: _Counts
) -> Block:
    rows = {
        name: reading.column(name, [batch.column(source) for source in sources])
        for name, sources in columns.items()
    }
    rows.setdefault("seq", np.zeros(batch.num_rows, np.int32))
    end = reading.first_row + batch.num_rows
    if "expert" in rows:
        # Without a rank, the experts of a token are as the file orders them.
        rows.setdefault("rank", np.arange(reading.first_row, end))
    if "pos" not in rows:
        rows["pos"] = counts.positions(rows["seq"])
    reading.first_row = end
    return rows


# -- columns ---------------------------------------------------------------------------


class _Columns:
    """Makes our columns of a table's, some rows at a time.

    Args:
        path: the file.
        counts: numbers its sequences.

    Attributes:
        first_row: number of the first row at hand.
    """

    def __init__(self, path: Path, counts: _Counts) -> None:
        self.first_row = 0
        self._path = path
        self._counts = counts
        # Of lists, as in the first row.
        self._widths: dict[str, int] = {}

    def column(self, name: str, columns: list[Any]) -> np.ndarray:
        """Return one of our columns: [N], or [N, K] for lists."""
        for array in columns:
            if array.null_count:
                row = int(np.argmax(np.asarray(array.is_null())))
                raise self._error(row, name, "a value in every row", "null")

        if name == "phase":
            return self._phases(columns[0])
        if name == "seq" and not self._counts.keeps_numbers:
            return _sequences(columns[0], self._counts.sequences)
        if name in _LISTS:
            return self._lists(name, columns)

        array = np.asarray(columns[0])
        is_weight = name == "weight"
        kinds = "fiu" if is_weight else "iu"
        if array.dtype.kind not in kinds:
            expected = "numbers" if is_weight else "integers"
            raise self._wrong(name, expected, columns[0].type)
        if is_weight:
            return array.astype(np.float32)

        self._check_range(name, array, "numbers from 0", _LIMITS.get(name, 1 << 31))
        return array.astype(_DTYPES.get(name, np.int32))

    def _error(
        self, row: int, name: str, expected: object, actual: object
    ) -> TraceError:
        place = f"row {self.first_row + row}: {name}"
        return layout_error(self._path, place, expected, actual)

    def _wrong(self, name: str, expected: str, actual: object) -> TraceError:
        return layout_error(self._path, name, expected, actual, _WRONG_MAPPING)

    def _check_range(
        self, name: str, numbers: np.ndarray, expected: str, limit: int
    ) -> None:
        low = numbers.min()
        high = numbers.max()
        if not 0 <= int(low) <= int(high) < limit:
            raise self._wrong(name, expected, f"{low}..{high}")

    def _phases(self, array: Any) -> np.ndarray:
        """int8 [N] of names, or of 0 and 1."""
        if pa.types.is_integer(array.type):
            phase = np.asarray(array)
            if not 0 <= phase.min() <= phase.max() <= 1:
                actual = f"{phase.min()}..{phase.max()}"
                expected = "0 (prefill) or 1 (decode)"
                raise layout_error(self._path, "phase", expected, actual)
            return phase.astype(np.int8)

        known = codes(array, list(_PHASES))
        if (known < 0).any():
            row = int(np.argmax(known < 0))
            expected = f"one of {', '.join(_PHASES)}"
            raise self._error(row, "phase", expected, array[row].as_py())
        return np.array(list(_PHASES.values()), np.int8)[known]

    def _lists(self, name: str, arrays: list[Any]) -> np.ndarray:
        """[N, K] of a column of lists or of texts, or of several plain columns."""
        lengths, cells = _list_cells(self._path, name, arrays)

        width = self._widths.setdefault(name, int(lengths[0]))
        if width < 1 or (lengths != width).any():
            row = int(np.argmax(lengths != width))
            expected = f"{width} values as in the first row"
            raise self._error(row, name, expected, int(lengths[row]))

        is_ids = name == "experts"
        kinds = "iu" if is_ids else "iuf"
        if cells.dtype.kind not in kinds:
            expected = "integers" if is_ids else "numbers"
            raise self._wrong(name, expected, cells.dtype)

        if not is_ids:
            # 16-bit floats stay what they are: a way through 32 bits changes nothing.
            kind = np.float16 if cells.dtype == np.float16 else np.float32
            return cells.astype(kind, copy=False).reshape(len(lengths), -1)

        self._check_range(name, cells, "expert ids", 1 << 16)
        return cells.astype(np.uint16, copy=False).reshape(len(lengths), -1)


def _sequences(array: Any, sequences: Appearance) -> np.ndarray:
    """Numbers of sequences, whatever their names."""
    if pa.types.is_integer(array.type):
        return sequences.of_numbers(np.asarray(array))

    is_encoded = isinstance(array, pa.DictionaryArray)
    encoded = array if is_encoded else array.dictionary_encode()
    labels = encoded.dictionary.to_pylist()
    return sequences.of_labels(labels, np.asarray(encoded.indices))


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

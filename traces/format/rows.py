"""Rows of Arrow tables as numpy arrays of the kinds that a trace has, and what rows of
a trace must satisfy, whoever writes or reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from moesim.traces.format.arrays import first_repeat, to_float16
from moesim.traces.format.parquet import codes, flat, numbers, values
from moesim.traces.format.schema import PREDICTION_COLUMNS, REQUIRED_COLUMNS, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from moesim.base.errors import TraceError
    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]
    # Of (row, column, expected, got, way out).
    Fault = Callable[[int, str, str, object, str], TraceError]

LISTS = ("experts", "weights", "scores", *PREDICTION_COLUMNS)
"""Our columns that hold several values a row."""

# Of whole numbers: type, least value, and the first that is too large.
_KINDS = {
    "expert": (np.uint16, 0, 1 << 16),
    "experts": (np.uint16, 0, 1 << 16),
    "rank": (np.int64, 0, 1 << 63),
    "from_end": (np.int32, -(1 << 31), 1 << 31),
    # Only passed on.
    "token": (np.int32, -(1 << 31), 1 << 31),
    "step": (np.int64, 0, 1 << 53),
}
_WHOLE = (np.int32, 0, 1 << 31)
_PHASES = {
    "prefill": Phase.PREFILL,
    "prompt": Phase.PREFILL,
    "0": Phase.PREFILL,
    "decode": Phase.DECODE,
    "generate": Phase.DECODE,
    "1": Phase.DECODE,
}


class Rows(NamedTuple):
    """Some rows of a table. N rows.

    Attributes:
        columns: our column -> Arrow arrays [N]: one, or several that are a list.
        length: N.
        fault: the error of a row, our column, what was expected and what was found.
        file: number of the one that they are of, of those that people joined.
        needed: what a row must have; one that has it not has a null somewhere.
    """

    columns: Mapping[str, Sequence[Any]]
    length: int
    fault: Callable[[int, str, str, object], TraceError]
    file: int = 0
    needed: str = "a value in every row"


class Appearance:
    """Numbers sequences from 0 by their first row, whatever the file calls them."""

    def __init__(self) -> None:
        self._number_of: dict[tuple[int, object], int] = {}

    def numbers(self, array: Any, file: int) -> np.ndarray:
        """Return numbers int32 [N] of labels, an Arrow array [N]."""
        is_encoded = isinstance(array, pa.DictionaryArray)
        encoded = array if is_encoded else array.dictionary_encode()
        labels = encoded.dictionary.to_pylist()
        number_of_label = np.full(len(labels), -1, np.int32)
        for at in values(encoded.indices.unique()).tolist():
            number = len(self._number_of)
            key = (file, labels[at])
            number_of_label[at] = self._number_of.setdefault(key, number)
        return np.asarray(number_of_label[values(encoded.indices)])


def blocks(
    parts: Iterable[Rows],
    sequences: Appearance | None = None,
    *,
    keeps_numbers: bool = False,
    widths: Mapping[str, int] | None = None,
) -> Iterator[Block]:
    """Return rows as numpy arrays, checked one by one.

    Args:
        parts: the rows.
        sequences: numbers them by their first row; each file has its own where None.
        keeps_numbers: sequences have the numbers that the file gives them.
        widths: of lists; those of the first row where they are not stated.

    Raises:
        TraceError: a value that is missing or no such thing, lists of several lengths.
    """
    sequences = sequences or Appearance()
    known_widths = dict(widths or {})
    for rows in parts:
        block: Block = {"seq": np.full(rows.length, rows.file, np.int32)}
        for name, arrays in rows.columns.items():
            _check_nulls(rows, name, arrays)
            if name == "phase":
                block[name] = _phases(rows, arrays[0])
            elif name == "seq" and not keeps_numbers:
                block[name] = sequences.numbers(arrays[0], rows.file)
            elif name in LISTS:
                block[name] = _lists(rows, name, arrays, known_widths)
            else:
                block[name] = _scalars(rows, name, arrays[0])
        yield block


def _check_nulls(rows: Rows, name: str, arrays: Sequence[Any]) -> None:
    for array in arrays:
        if array.null_count:
            row = int(np.argmax(is_null(array)))
            raise rows.fault(row, name, rows.needed, "null")


def is_null(array: Any) -> np.ndarray:
    """Return which values of an Arrow array [N] are null: bool [N]."""
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False))


def _scalars(rows: Rows, name: str, array: Any) -> np.ndarray:
    if name == "weight":
        return _floats(rows, name, array)
    return _whole(rows, name, array, 1)


def _floats(rows: Rows, name: str, array: Any) -> np.ndarray:
    """32-bit floats; 16-bit ones stay what they are: a way through 32 changes
    nothing.
    """
    _check_numbers(rows, name, array)
    given = values(array)
    kind = np.float16 if given.dtype == np.float16 else np.float32
    # What is too large becomes infinite, which no trace takes.
    with np.errstate(over="ignore"):
        return given.astype(kind, copy=False)


def _check_numbers(rows: Rows, name: str, array: Any) -> None:
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        raise rows.fault(0, name, "numbers", array.type)


def _whole(rows: Rows, name: str, array: Any, width: int) -> np.ndarray:
    """Whole numbers within the limits of a column, `width` of them a row."""
    _check_numbers(rows, name, array)
    kind, least, limit = _KINDS.get(name, _WHOLE)
    given = values(array)
    if not len(given):
        return given.astype(kind)
    # What is not a number makes the least one, too, and compares as false.
    if given.min() >= least and given.max() < limit:
        integers = given.astype(kind, copy=False)
        if given.dtype.kind != "f" or (integers == given).all():
            return integers
    fine = (given >= least) & (given < limit) & (np.floor(given) == given)
    at = int(fine.argmin())
    expected = f"a whole number {least}..{limit - 1}"
    if name not in _KINDS:
        expected = "a whole number from 0"
    raise rows.fault(at // width, name, expected, given[at])


def _phases(rows: Rows, array: Any) -> np.ndarray:
    """int8 [N] of names, or of 0 and 1."""
    if pa.types.is_integer(array.type):
        phase = values(array)
        wrong = (phase < 0) | (phase > 1)
        if wrong.any():
            row = int(wrong.argmax())
            expected = "0 (prefill) or 1 (decode)"
            raise rows.fault(row, "phase", expected, phase[row])
        return phase.astype(np.int8)

    known = codes(array, list(_PHASES))
    if (known < 0).any():
        row = int(np.argmax(known < 0))
        expected = f"one of {', '.join(_PHASES)}"
        raise rows.fault(row, "phase", expected, array[row].as_py())
    return np.array(list(_PHASES.values()), np.int8)[known]


def _lists(
    rows: Rows, name: str, arrays: Sequence[Any], widths: dict[str, int]
) -> np.ndarray:
    """[N, K] of a column of lists or of texts, or of several plain columns."""
    lengths, cells = _cells(name, arrays)
    width = widths.setdefault(name, int(lengths[0]) if len(lengths) else 1)
    wrong = lengths != width
    if width < 1 or wrong.any():
        row = int(wrong.argmax())
        expected = f"{max(width, 1)} values as in all rows"
        raise rows.fault(row, name, expected, lengths[row])
    if cells.null_count:
        row = int(np.argmax(is_null(cells))) // width
        raise rows.fault(row, name, "numbers in every list", "null")
    if name == "experts":
        return _whole(rows, name, cells, width).reshape(-1, width)

    return _floats(rows, name, cells).reshape(-1, width)


def _cells(name: str, arrays: Sequence[Any]) -> tuple[np.ndarray, Any]:
    """Length of each row's list, and the values of all lists as Arrow has them."""
    array = arrays[0]
    kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.cast(kind.value_type)
        kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        array = _split(array, "int64" if name == "experts" else "float32")
    elif pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        array = array.cast(pa.list_(kind.value_type))
    if pa.types.is_list(array.type):
        return np.diff(values(array.offsets)), flat(array)

    columns = np.stack([values(column) for column in arrays], axis=1)
    return np.full(len(array), len(arrays)), numbers(columns.reshape(-1))


def _split(array: Any, kind: str) -> Any:
    """Texts as lists of numbers; words that are none raise as Arrow does."""
    from pyarrow import compute  # noqa: PLC0415 - not every import has lists in texts

    blanks = compute.replace_substring_regex(array, r"[\[\](){}|;,\s]+", " ")
    plain = compute.utf8_trim_whitespace(blanks)
    split = compute.split_pattern(plain.cast(pa.string()), " ")
    return pa.ListArray.from_arrays(split.offsets, split.values.cast(kind))


# -- what a trace promises -------------------------------------------------------------

KINDS = {
    "seq": np.int32,
    "pos": np.int32,
    "phase": np.int8,
    "layer": np.int16,
    "token": np.int32,
    "experts": np.uint16,
}
"""Of the numbers of a column; all others are float16."""
_NO_WAY = "a token without all its layers cannot be replayed"


def checked_rows(
    block: Block, shape: ModelShape, last: tuple[int, int], error: Fault
) -> tuple[Block, tuple[int, int]]:
    """Check rows of a trace, and convert them to its kinds of numbers.

    Args:
        block: columns [N] or [N, width] of numbers of any kind.
        shape: the model.
        last: sequence and place (``position * layers + layer``) of the row before.
        error: makes an error; rows count from the first of the block.

    Returns:
        The columns, and sequence and place of the last row.

    Raises:
        TraceError: ids out of range or twice in a row, values that are not finite or
            negative weights, rows that do not ascend by seq, pos, layer.
    """
    limits = {"layer": shape.layers, "phase": len(Phase), "experts": shape.experts}
    rows = {}
    for name, column in block.items():
        if name in REQUIRED_COLUMNS:
            _check_range(name, column, limits.get(name, 1 << 31), error)
        if name in KINDS:
            rows[name] = np.ascontiguousarray(column, KINDS[name])
        else:
            rows[name] = _finite(name, column, error)

    row = first_repeat(rows["experts"])
    if row >= 0:
        ids = rows["experts"][row].tolist()
        raise error(row, "experts", "distinct ids", ids, "is top-k right?")

    seq = np.concatenate(([last[0]], rows["seq"]))
    # Position and layer in one number, so that one comparison settles both.
    places = rows["pos"].astype(np.int64) * shape.layers + rows["layer"]
    place = np.concatenate(([last[1]], places))
    step = np.diff(seq)
    ascends = (step > 0) | ((step == 0) & (np.diff(place) > 0))
    if not ascends.all():
        row = int(np.argmin(ascends))
        this, before = (
            f"seq {seq[at]} pos {place[at] // shape.layers} layer"
            f" {place[at] % shape.layers}"
            for at in (row + 1, row)
        )
        actual = f"{this} after {before}"
        raise error(row, "order", "rows by seq, pos, layer", actual, "sort them")
    return rows, (int(seq[-1]), int(place[-1]))


def _check_range(name: str, column: np.ndarray, limit: int, error: Fault) -> None:
    if not column.size or (column.min() >= 0 and column.max() < limit):
        return
    row, *place = np.argwhere((column < 0) | (column >= limit))[0]
    way_out = "does the shape fit this trace?"
    raise error(row, name, f"0..{limit - 1}", column[row, *place], way_out)


def _finite(name: str, column: np.ndarray, error: Fault) -> np.ndarray:
    """float16 [N, width]."""
    rounded, all_finite = to_float16(column)
    expected = "a finite 16-bit float"
    wrong = None if all_finite else ~np.isfinite(rounded)
    # Every gate combines experts by shares; a score may well be negative.
    if wrong is None and name == "weights" and rounded.size and rounded.min() < 0:
        expected = "a number >= 0"
        wrong = rounded < 0
    if wrong is not None:
        row, place = np.argwhere(wrong)[0]
        cell = f"{name}[{place}]"
        raise error(row, cell, expected, column[row, place], "record it again")
    return rounded


def check_sequence(
    pos: np.ndarray,
    phase: np.ndarray,
    layer: np.ndarray,
    layers: int,
    error: Fault,
) -> None:
    """Check that decode follows prefill and that no layer step is empty. N rows, sorted
    by pos, layer.

    A ragged prefill is legal: some runtimes compute the last layer for the final prompt
    token only.

    Args:
        pos: int [N].
        phase: int [N], codes of `Phase`.
        layer: int [N].
        layers: L, MoE layers of the model.
        error: makes the error of (row within the sequence, column, expected, got, way
            out).

    Raises:
        TraceError: a negative position, a prefill row behind a decode row, a layer
            without any prompt token, a decode token without all its layers.
    """
    # Sorted, so the first one is the least.
    if len(pos) and pos[0] < 0:
        raise error(0, "pos", "a position from 0", int(pos[0]), "number tokens from 0")

    back = np.diff(phase) < 0
    if back.any():
        row = int(np.argmax(back)) + 1
        expected = "decode until the sequence ends"
        raise error(row, "phase", expected, "prefill after decode", "sort by pos")

    # Prefill comes first by now, so its end can be searched for.
    prompt = int(np.searchsorted(phase, Phase.DECODE))
    prompt_rows = np.bincount(layer[:prompt], minlength=layers)
    if prompt and not prompt_rows.all():
        missing = int(np.argmin(prompt_rows))
        expected = f"prompt tokens at each of {layers} layers"
        raise error(0, "layer", expected, f"none at layer {missing}", _NO_WAY)

    _check_decode(pos[prompt:], layer[prompt:], prompt, layers, error)


def _check_decode(
    pos: np.ndarray,
    layer: np.ndarray,
    prompt: int,
    layers: int,
    error: Fault,
) -> None:
    """Check that every generated token has all its layers in order; `prompt` rows stand
    before.
    """
    due = np.resize(np.arange(layers, dtype=layer.dtype), len(layer))
    wrong = layer != due
    # The right layer, but of another token.
    wrong[1:] |= (due[1:] > 0) & (pos[1:] != pos[:-1])

    if wrong.any():
        row = int(np.argmax(wrong))
        token = pos[row - 1] if due[row] else pos[row]
        expected = f"layer {due[row]} of {layers} of the decode token at pos {token}"
        actual = f"layer {layer[row]} at pos {pos[row]}"
        raise error(prompt + row, "layer", expected, actual, _NO_WAY)

    # All layers so far were in order, so only the last token can lack some.
    if len(layer) % layers:
        last = prompt + len(layer) - 1
        token = pos[-1]
        expected = (
            f"layer {layer[-1] + 1} of {layers} of the decode token at pos {token}"
        )
        raise error(last, "layer", expected, "the end of the sequence", _NO_WAY)

"""What rows of a trace must satisfy, whoever writes or reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.arrays import first_repeat, to_float16
from moesim.traces.format.schema import REQUIRED_COLUMNS, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.base.errors import TraceError
    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]
    # Of (row, column, expected, got, way out).
    Fault = Callable[[int, str, str, object, str], TraceError]

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
    for name, values in block.items():
        if name in REQUIRED_COLUMNS:
            _check_range(name, values, limits.get(name, 1 << 31), error)
        if name in KINDS:
            rows[name] = np.ascontiguousarray(values, KINDS[name])
        else:
            rows[name] = _finite(name, values, error)

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


def _check_range(name: str, values: np.ndarray, limit: int, error: Fault) -> None:
    if not values.size or (values.min() >= 0 and values.max() < limit):
        return
    row, *place = np.argwhere((values < 0) | (values >= limit))[0]
    way_out = "does the shape fit this trace?"
    raise error(row, name, f"0..{limit - 1}", values[row, *place], way_out)


def _finite(name: str, values: np.ndarray, error: Fault) -> np.ndarray:
    """float16 [N, width]."""
    rounded, all_finite = to_float16(values)
    expected = "a finite 16-bit float"
    wrong = None if all_finite else ~np.isfinite(rounded)
    # Every gate combines experts by shares; a score may well be negative.
    if wrong is None and name == "weights" and rounded.size and rounded.min() < 0:
        expected = "a number >= 0"
        wrong = rounded < 0
    if wrong is not None:
        row, place = np.argwhere(wrong)[0]
        column = f"{name}[{place}]"
        raise error(row, column, expected, values[row, place], "record it again")
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

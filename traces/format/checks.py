"""What every sequence of a trace must satisfy before it can be cut into steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.base.errors import TraceError

NO_WAY = "a token without all its layers cannot be replayed"


def check_sequence(
    pos: np.ndarray,
    phase: np.ndarray,
    layer: np.ndarray,
    layers: int,
    error: Callable[..., TraceError],
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
        raise error(0, "layer", expected, f"none at layer {missing}", NO_WAY)

    _check_decode(pos[prompt:], layer[prompt:], prompt, layers, error)


def _check_decode(
    pos: np.ndarray,
    layer: np.ndarray,
    prompt: int,
    layers: int,
    error: Callable[..., TraceError],
) -> None:
    """Whether every generated token has all its layers in order; `prompt` rows stand
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
        raise error(prompt + row, "layer", expected, actual, NO_WAY)

    # All layers so far were in order, so only the last token can lack some.
    if len(layer) % layers:
        last = prompt + len(layer) - 1
        token = pos[-1]
        expected = (
            f"layer {layer[-1] + 1} of {layers} of the decode token at pos {token}"
        )
        raise error(last, "layer", expected, "the end of the sequence", NO_WAY)

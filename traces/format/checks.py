"""What every sequence of a trace must satisfy before it can be cut into steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.traces.errors import TraceError

NO_WAY = "a token without all its layers cannot be replayed"


def check_sequence(
    pos: np.ndarray,
    phase: np.ndarray,
    layer: np.ndarray,
    layers: int,
    bad: Callable[..., TraceError],
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
        bad: makes the error of (row within the sequence, column, expected, got, way
            out).

    Raises:
        TraceError: a prefill row behind a decode row, a layer without any prompt token,
            a decode token without all its layers.
    """
    if (back := np.diff(phase) < 0).any():
        row = int(np.argmax(back)) + 1
        raise bad(
            row,
            "phase",
            "decode until the sequence ends",
            "prefill after decode",
            "sort by pos",
        )
    prompt = int(np.searchsorted(phase, Phase.DECODE))
    present = np.bincount(layer[:prompt], minlength=layers)
    if prompt and not present.all():
        missing = int(np.argmin(present))
        raise bad(
            0,
            "layer",
            f"prompt tokens at each of {layers} layers",
            f"none at layer {missing}",
            NO_WAY,
        )
    decode = layer[prompt:]
    places = pos[prompt:]
    due = np.resize(np.arange(layers, dtype=decode.dtype), len(decode))
    wrong = decode != due
    wrong[1:] |= (due[1:] > 0) & (places[1:] != places[:-1])
    if wrong.any():
        row = int(np.argmax(wrong))
        token = places[row - 1] if due[row] else places[row]
        expected = f"layer {due[row]} of {layers} of the decode token at pos {token}"
        raise bad(
            prompt + row,
            "layer",
            expected,
            f"layer {decode[row]} at pos {places[row]}",
            NO_WAY,
        )
    if len(decode) % layers:
        expected = (
            f"layer {decode[-1] + 1} of {layers} of the decode token at pos"
            f" {places[-1]}"
        )
        raise bad(len(layer) - 1, "layer", expected, "the end of the sequence", NO_WAY)

"""The order of a trace's rows: ascending by sequence, position and layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping


class Followed(NamedTuple):
    """Rows of a block behind the last row before it.

    Attributes:
        seq: [1 + N] sequences.
        place: int64 [1 + N], ``position * layers + layer``.
        row: first row of the block that does not ascend; None if all do.
    """

    seq: np.ndarray
    place: np.ndarray
    row: int | None


def follow(
    last: tuple[int, int],
    block: Mapping[str, np.ndarray],
    layers: int,
) -> Followed:
    """Check that the rows of a block ascend from the row before it.

    Args:
        last: sequence and place of the row before.
        block: ``seq``, ``pos`` and ``layer`` of N rows.
        layers: of the model.
    """
    last_seq, last_place = last
    seq = np.concatenate(([last_seq], block["seq"]))
    # Position and layer in one number, so that one comparison settles both.
    places = block["pos"].astype(np.int64) * layers + block["layer"]
    place = np.concatenate(([last_place], places))

    step = np.diff(seq)
    ascends = (step > 0) | ((step == 0) & (np.diff(place) > 0))
    return Followed(seq, place, None if ascends.all() else int(np.argmin(ascends)))

"""A token uses an expert once: rows whose ids are not all different."""

from __future__ import annotations

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.machine_code.types import input_array

_FEW_IDS = 1 << 17
"""So many are sorted before machine code would be loaded: 5 ms."""


def first_repeat(ids: np.ndarray) -> int:
    """Return the first row of `ids`, uint16 [N, K], that names an id twice; -1 where
    none does.
    """
    if ids.size > _FEW_IDS:
        return _first_repeat(ids)
    ascending = np.sort(ids, axis=1)
    repeats = (ascending[:, 1:] == ascending[:, :-1]).any(axis=1)
    return int(np.argmax(repeats)) if repeats.any() else -1


@compiled(nb.int64(input_array(nb.uint16, 2)))
def _first_repeat(ids: np.ndarray) -> int:
    """The same, without sorting."""
    top = np.uint16(0)
    for row in range(len(ids)):
        for place in range(ids.shape[1]):
            top = max(top, ids[row, place])

    # The row that named each id last; so nothing has to be cleared between rows.
    last_row = np.full(np.int64(top) + 1, -1, np.int64)
    for row in range(len(ids)):
        for place in range(ids.shape[1]):
            if last_row[ids[row, place]] == row:
                return row
            last_row[ids[row, place]] = row

    return -1

"""A token uses an expert once: rows whose ids are not all different, without sorting
them.
"""

from __future__ import annotations

import numpy as np
from numba import types as nb

from moesim.traces.compilation import compiled, input_array


@compiled(nb.int64(input_array(nb.uint16, 2)))
def first_repeat(ids: np.ndarray) -> int:
    """Return the first row of `ids` [N, K] that names an id twice; -1 where none
    does.
    """
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

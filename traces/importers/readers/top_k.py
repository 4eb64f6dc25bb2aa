"""The K largest of a row, best first: many times faster than sorting the whole row."""

from __future__ import annotations

import numpy as np
from moesim.traces.compilation import compiled
from numba import types as nb


@compiled(nb.int32[:, ::1](nb.Array(nb.float32, 2, "C", readonly=True), nb.int64))
def top_k(values: np.ndarray, count: int) -> np.ndarray:
    """Places [N, K] of the `count` largest of each row of `values` [N, E]; equal values
    go to the lower place.
    """
    rows, width = values.shape
    best = np.empty((rows, count), np.int32)
    held = np.empty(count, np.float32)  # the values there
    for row in range(rows):
        kept = 0
        for place in range(width):
            value = values[row, place]
            if kept < count:
                at = kept
                kept += 1
            elif value <= held[count - 1]:
                continue
            else:
                at = count - 1
            while at > 0 and value > held[at - 1]:
                held[at], best[row, at] = held[at - 1], best[row, at - 1]
                at -= 1
            held[at] = value
            best[row, at] = place
    return best

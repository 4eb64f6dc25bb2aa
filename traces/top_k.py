"""The K largest of a row, best first: many times faster than sorting the whole row."""

from __future__ import annotations

import numpy as np
from numba import types as nb

from traces.compiled import compiled


@compiled(nb.int32[:, ::1](nb.Array(nb.float32, 2, "C", readonly=True), nb.int64))
def top_k(values: np.ndarray, count: int) -> np.ndarray:
    """Places [N, K] of the `count` largest of each row of `values` [N, E]; equal values go to the lower place."""
    rows, width = values.shape
    best = np.empty((rows, count), np.int32)
    for row in range(rows):
        kept = 0
        for place in range(width):
            value = values[row, place]
            if kept == count and value <= values[row, best[row, kept - 1]]:
                continue
            at = kept if kept < count else count - 1
            kept = min(kept + 1, count)
            while at > 0 and value > values[row, best[row, at - 1]]:
                best[row, at] = best[row, at - 1]
                at -= 1
            best[row, at] = place
    return best

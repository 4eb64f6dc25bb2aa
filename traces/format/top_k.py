"""The K largest of a row, best first: many times faster than sorting the whole row."""

from __future__ import annotations

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.machine_code.types import input_array


@compiled(nb.int32[:, ::1](input_array(nb.float32, 2), nb.int64))
def top_k(
    values: np.ndarray,
    count: int,
) -> np.ndarray:
    """Return the places [N, K] of the `count` largest of each row of `values` [N, E];
    equal values go to the lower place.
    """
    rows, width = values.shape
    best = np.empty((rows, count), np.int32)
    best_values = np.empty(count, np.float32)

    for row in range(rows):
        kept = 0
        for place in range(width):
            value = values[row, place]
            if kept < count:
                rank = kept
                kept += 1
            # Not above the last of them: with equal values the lower place stays.
            elif value <= best_values[count - 1]:
                continue
            else:
                rank = count - 1

            # Insertion: K is small, and most values are turned down above.
            while rank > 0 and value > best_values[rank - 1]:
                best_values[rank] = best_values[rank - 1]
                best[row, rank] = best[row, rank - 1]
                rank -= 1
            best_values[rank] = value
            best[row, rank] = place

    return best

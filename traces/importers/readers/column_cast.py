"""Some columns of a table of numbers, checked on the way: one visit per number.

Indexing would gather them, look for the least and the largest, and turn them into
another type, one after the other.
"""

from __future__ import annotations

import numpy as np
from moesim.traces.compilation import compiled
from numba import types as nb

_NUMBERS = nb.Array(nb.float64, 2, "C", readonly=True)
_WHOLE = nb.Array(nb.boolean, 2, "C", readonly=True)
_COLUMNS = nb.Array(nb.int64, 1, "C", readonly=True)
_LIMITS = nb.Array(nb.float64, 1, "C", readonly=True)


@compiled(
    [
        nb.boolean(_NUMBERS, _WHOLE, _COLUMNS, _LIMITS, _LIMITS, nb.Array(kind, 2, "A"))
        for kind in (nb.int8, nb.uint16, nb.int32, nb.int64)
    ]
)
def whole_numbers(
    number: np.ndarray,
    whole: np.ndarray,
    columns: np.ndarray,
    least: np.ndarray,
    most: np.ndarray,
    found: np.ndarray,
) -> bool:
    """Fill `found` [N, C] with C columns of `number` [N, M].

    Args:
        number: float64 [N, M]; what is not a number is none of those asked for.
        whole: bool [N, M]; whether each was written as a whole number.
        columns: int64 [C].
        least: float64 [C].
        most: float64 [C].
        found: of any layout.

    Returns:
        Whether all are whole, and within their limits.
    """
    fine = True
    for row in range(len(number)):
        for place in range(len(columns)):
            column = columns[place]
            value = number[row, column]
            fine &= whole[row, column] and least[place] <= value <= most[place]
            found[row, place] = np.int64(value)
    return fine


@compiled(nb.float32[:, ::1](_NUMBERS, _COLUMNS))
def floats(number: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """C columns of `number` [N, M], as float32 [N, C]."""
    found = np.empty((len(number), len(columns)), np.float32)
    for row in range(len(number)):
        for place in range(len(columns)):
            found[row, place] = number[row, columns[place]]
    return found

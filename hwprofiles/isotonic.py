"""Isotonic regression: the non-decreasing curve closest to measured points."""

from __future__ import annotations

import numpy as np


def isotonic(values: np.ndarray) -> np.ndarray:
    """Return the non-decreasing sequence closest to `values` in the least-squares
    sense.

    More tokens never take less time; a table in which they do holds noise.

    Args:
        values: [N].

    Returns:
        float64 [N].

    Source: pool adjacent violators.
    """
    # Blocks of pooled values; their means are strictly ascending.
    means: list[float] = []
    lengths: list[int] = []
    for value in np.asarray(values, dtype=np.float64):
        means.append(float(value))
        lengths.append(1)

        # A value below its predecessors is pooled with them, as far back as needed.
        while len(means) > 1 and means[-2] >= means[-1]:
            mean = means.pop()
            length = lengths.pop()
            total = lengths[-1] + length
            weighted = means[-1] * lengths[-1] + mean * length
            means[-1] = weighted / total
            lengths[-1] = total
    return np.repeat(means, lengths)

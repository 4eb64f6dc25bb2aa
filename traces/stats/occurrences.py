"""When each expert was used before, or is used next."""

from __future__ import annotations

import numpy as np


def before(key: np.ndarray, place: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the place of each key's occurrence before.

    Args:
        key: int [A], in order.
        place: int64 [A].
        last: int64 by key, the places of occurrences before all these; afterwards those
            of the last ones.
    """
    # Sixteen bits are sorted in linear time, and hold the experts of nearly any model.
    order = np.argsort(key.astype(np.min_scalar_type(len(last))), kind="stable")
    keys = key[order]
    places = place[order]
    is_first = np.diff(keys, prepend=-1) != 0
    earlier = np.roll(places, 1)
    earlier[is_first] = last[keys[is_first]]
    is_last = np.roll(is_first, -1)
    last[keys[is_last]] = places[is_last]

    result = np.empty_like(earlier)
    result[order] = earlier
    return result

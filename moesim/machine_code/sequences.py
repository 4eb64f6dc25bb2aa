"""Functions of NumPy as compiled functions have them: on arrays of one axis."""

from __future__ import annotations

import numpy as np

from moesim.machine_code.functions import compiled

_INSERTION_LIMIT = 16


@compiled
def argsort(values: np.ndarray) -> np.ndarray:
    """Places by ascending value, equal ones in their order: int64.

    By insertion in short runs, which are then merged.
    """
    count = len(values)
    order = np.empty(count, np.int64)
    for begin in range(0, count, _INSERTION_LIMIT):
        for i in range(begin, min(begin + _INSERTION_LIMIT, count)):
            j = i
            while j > begin and values[order[j - 1]] > values[i]:
                order[j] = order[j - 1]
                j -= 1
            order[j] = i
    if count <= _INSERTION_LIMIT:
        return order
    other = np.empty(count, np.int64)
    width = _INSERTION_LIMIT
    while width < count:
        for begin in range(0, count, 2 * width):
            middle = min(begin + width, count)
            end = min(begin + 2 * width, count)
            left = begin
            right = middle
            for n in range(begin, end):
                takes_left = left < middle
                if takes_left and right < end:
                    takes_left = not values[order[right]] < values[order[left]]
                if takes_left:
                    other[n] = order[left]
                    left += 1
                else:
                    other[n] = order[right]
                    right += 1
        for n in range(count):
            order[n] = other[n]
        width *= 2
    return order


@compiled
def argmin(values: np.ndarray) -> int:
    """The first place of the least value."""
    best = 0
    for n in range(1, len(values)):
        if values[n] < values[best]:
            best = n
    return best


@compiled
def flatnonzero(values: np.ndarray) -> np.ndarray:
    """Places of what is not zero, ascending: int64."""
    places = np.empty(len(values), np.int64)
    count = 0
    for n in range(len(values)):
        if values[n]:
            places[count] = n
            count += 1
    return places[:count]


@compiled
def searchsorted(ascending: np.ndarray, value: float) -> int:
    """The first place whose value is not below one."""
    low = 0
    high = len(ascending)
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low

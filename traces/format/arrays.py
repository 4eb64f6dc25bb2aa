"""Small operations on rows of numbers, each many times faster than numpy's own."""

from __future__ import annotations

import numpy as np

# -- top k -----------------------------------------------------------------------------
# The K largest of a row, best first: many times faster than sorting the whole row.


def top_k(values: np.ndarray, count: int) -> np.ndarray:
    """Return the places [N, K] of the `count` largest of each row of `values` [N, E];
    equal values go to the lower place.
    """
    rows = len(values)
    width = values.shape[1]
    made = np.empty((rows, count), np.int32)
    best = made.data
    best_values = np.empty(count, np.float32).data

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

    return made


def predicted_workload(scores: np.ndarray, count: int) -> np.ndarray:
    """Count how often each expert is among the `count` best scores of a token: int32
    [E], of float32 [T, E].
    """
    experts = scores.shape[1]
    best = top_k(scores, min(count, experts)).reshape(-1)
    return np.bincount(best, minlength=experts).astype(np.int32)


# -- distinct --------------------------------------------------------------------------
# A token uses an expert once: rows whose ids are not all different.


def first_repeat(ids: np.ndarray) -> int:
    """Return the first row of `ids`, uint16 [N, K], that names an id twice; -1 where
    none does.
    """
    top = 0
    for row in range(len(ids)):
        for place in range(ids.shape[1]):
            top = max(top, ids[row, place])

    # The row that named each id last; so nothing has to be cleared between rows.
    last_row = np.full(top + 1, -1, np.int64).data
    for row in range(len(ids)):
        for place in range(ids.shape[1]):
            if last_row[ids[row, place]] == row:
                return row
            last_row[ids[row, place]] = row

    return -1


# -- float16 ---------------------------------------------------------------------------
# 32-bit floats as 16-bit ones, faster than numpy, which asks the processor for each
# and takes 27 ns for the smallest.


def to_float16(values: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return numbers of any shape as float16, rounded to the nearest and to the even
    one of two; and whether all are finite.
    """
    if values.dtype == np.float32:
        rounded = np.empty(values.shape, np.float16)
        bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
        return rounded, _round_to_float16(bits, rounded.reshape(-1).view(np.uint16))

    with np.errstate(over="ignore"):
        rounded = np.asarray(values, np.float16)
    return rounded, bool(np.isfinite(rounded).all())


def _round_to_float16(bits: np.ndarray, rounded: np.ndarray) -> bool:
    """Fill `rounded` [N] with the bits of float16 numbers, given those of float32 ones
    [N]; return whether all are finite.

    A float32 has 8 bits of exponent (bias 127) over 23 digits, a float16 5 (bias 15)
    over 10; below 2**-14 the digits of a float16 are multiples of 2**-24. What is no
    number becomes infinity.
    """
    all_finite = True

    for at in range(len(bits)):
        # Without the sign, and at most 65,536, which becomes infinity.
        size = min(bits[at] & 0x7FFFFFFF, 143 << 23)

        if size >= 113 << 23:
            # 65,520 and above rounds to infinity.
            all_finite &= size < 0x477FF000
            shift = 13
            digits = size - (112 << 23)
        else:
            shift = min(126 - (size >> 23), 25)
            digits = size & 0x7FFFFF | 1 << 23

        # Just under half of the last place that is kept, and one more behind an odd
        # digit: adding it rounds to even.
        is_odd = digits >> shift & 1
        rounding = (1 << (shift - 1)) - 1 + is_odd

        sign = bits[at] >> 16 & 0x8000
        rounded[at] = (digits + rounding) >> shift | sign

    return all_finite

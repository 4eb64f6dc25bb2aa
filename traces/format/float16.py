"""32-bit floats as 16-bit ones: numpy asks the processor for each, and 27 ns for each
of the smallest.
"""

from __future__ import annotations

import numpy as np
from moesim.traces.compilation import compiled
from numba import types as nb


def halves(values: np.ndarray) -> tuple[np.ndarray, bool]:
    """float16 of numbers of any shape, to the nearest and the even one of two; and
    whether all are finite.
    """
    if values.dtype == np.float32:
        found = np.empty(values.shape, np.float16)
        bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
        return found, _halves(bits, found.reshape(-1).view(np.uint16))
    with np.errstate(over="ignore"):
        found = np.asarray(values, np.float16)
    return found, bool(np.isfinite(found).all())


@compiled(nb.boolean(nb.Array(nb.uint32, 1, "C", readonly=True), nb.uint16[::1]))
def _halves(bits: np.ndarray, found: np.ndarray) -> bool:
    """Fill `found` [N] with the bits of the halves of floats with these bits [N];
    whether all are finite.

    A float has 8 bits of exponent (bias 127) over 23 digits, a half 5 (bias 15) over
    10; below 2**-14 the digits of a half are multiples of 2**-24. Adding just under
    half of the last place, and one more behind an odd digit, rounds. What is no number
    becomes infinity.
    """
    one = np.uint32(1)
    beyond = False
    for at in range(len(bits)):
        # 65,536, which becomes infinity.
        size = min(bits[at] & np.uint32(0x7FFFFFFF), np.uint32(143 << 23))
        if size >= np.uint32(113 << 23):
            beyond |= size >= np.uint32(0x477FF000)  # 65,520, which rounds to infinity
            shift = np.uint32(13)
            digits = size - np.uint32(112 << 23)
        else:
            shift = min(np.uint32(126) - (size >> np.uint32(23)), np.uint32(25))
            digits = size & np.uint32(0x7FFFFF) | np.uint32(1 << 23)
        rounding = (one << (shift - one)) - one + (digits >> shift & one)
        found[at] = (digits + rounding) >> shift | (
            bits[at] >> np.uint32(16) & np.uint32(0x8000)
        )
    return not beyond

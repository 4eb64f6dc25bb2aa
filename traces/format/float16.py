"""32-bit floats as 16-bit ones, faster than numpy, which asks the processor for each
and takes 27 ns for the smallest.
"""

from __future__ import annotations

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.machine_code.types import input_array


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


@compiled(nb.boolean(input_array(nb.uint32), nb.uint16[::1]))
def _round_to_float16(
    bits: np.ndarray,
    rounded: np.ndarray,
) -> bool:
    """Fill `rounded` [N] with the bits of float16 numbers, given those of float32 ones
    [N]; return whether all are finite.

    A float32 has 8 bits of exponent (bias 127) over 23 digits, a float16 5 (bias 15)
    over 10; below 2**-14 the digits of a float16 are multiples of 2**-24. What is no
    number becomes infinity.
    """
    bit = np.uint32(1)
    all_finite = True

    for at in range(len(bits)):
        # Without the sign, and at most 65,536, which becomes infinity.
        size = min(bits[at] & np.uint32(0x7FFFFFFF), np.uint32(143 << 23))

        if size >= np.uint32(113 << 23):
            # 65,520 and above rounds to infinity.
            all_finite &= size < np.uint32(0x477FF000)
            shift = np.uint32(13)
            digits = size - np.uint32(112 << 23)
        else:
            shift = min(np.uint32(126) - (size >> np.uint32(23)), np.uint32(25))
            digits = size & np.uint32(0x7FFFFF) | np.uint32(1 << 23)

        # Just under half of the last place that is kept, and one more behind an odd
        # digit: adding it rounds to even.
        is_odd = digits >> shift & bit
        rounding = (bit << (shift - bit)) - bit + is_odd

        sign = bits[at] >> np.uint32(16) & np.uint32(0x8000)
        rounded[at] = (digits + rounding) >> shift | sign

    return all_finite

"""bfloat16, which numpy has no type for: its bits are the upper half of a float's."""

from __future__ import annotations

import functools

import numpy as np

# In place of a name of numpy's.
BF16 = "bf16"


@functools.cache
def raw_dtype(dtype: str) -> np.dtype:
    """Return the type of numbers as a file has them; `dtype` may be ``bf16``."""
    return np.dtype("<u2" if dtype == BF16 else dtype)


@functools.cache
def row_dtype(dtype: str) -> np.dtype:
    """Return the type of numbers once they are read; `dtype` may be ``bf16``."""
    return np.dtype("<f4" if dtype == BF16 else dtype)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Return bfloat16 numbers, given as uint16, as float32."""
    return np.asarray(bits.astype(np.uint32, order="C") << 16).view(np.float32)

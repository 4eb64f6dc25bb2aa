"""Arrays of the hot path: memoryviews, whose items are plain Python numbers.

Compiled, they are C arrays with bounds checked. Where nothing is compiled, NumPy's own
small integers would overflow, and its items are slow to take out one by one. Who takes
one says what it holds.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

# Names for readers: C's types stand in the `.pxd`, NumPy's arrays serve as well, and
# typeshed knows no certain shape of a memoryview.
Floats: TypeAlias = Any
Ints: TypeAlias = Any


def zeros(shape: Any, dtype: Any = np.float64) -> Any:
    """Zeros of a shape: int, or a tuple of ints."""
    return np.zeros(shape, dtype).data


def filled(shape: Any, value: Any, dtype: Any = np.float64) -> Any:
    """The same of another value."""
    return np.full(shape, value, dtype).data


def view_of(array: Any, dtype: Any) -> Any:
    """A contiguous array's memory, converted if it has to be; it may be read-only."""
    return np.ascontiguousarray(array, dtype).data


def read_only(array: Any, dtype: Any = None) -> Any:
    """The same, which nobody can write through: for what policies are shown."""
    return np.ascontiguousarray(array, dtype).data.toreadonly()

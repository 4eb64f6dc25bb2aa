"""Machine code for loops that see every access of a trace, and for every decision of a
run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numba
from numba import types as nb

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_R = TypeVar("_R")


def input_array(dtype: Any, ndim: int = 1) -> Any:
    """Type of a C-contiguous array that a loop only reads; writable ones fit too."""
    # A signature for mutable arrays refuses read-only ones.
    return nb.Array(dtype, ndim, "C", readonly=True)


def compiled(signature: Any) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compile a function for `signature` at import, and keep the machine code on disk.

    The function's Python type stays what it is.
    """
    # With a signature nothing is compiled in the middle of a timed run.
    compiler: Callable[[Callable[_P, _R]], Callable[_P, _R]] = numba.njit(
        signature, cache=True
    )
    return compiler

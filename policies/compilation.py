"""Numba types and decorators that all kernels of the policies share.

A decision is paid for on the critical path of every layer step, so its loop over the
active experts is a *kernel*: one function on plain arrays, compiled ahead of the first
call with an explicit signature. Nothing compiles while a replay runs. A kernel sees no
Python objects, so a compiled engine can call the same function.

Numba keeps the machine code on disk, beside the source file. That cache notices changes
in the kernel's own file only, not in the files of functions that it calls or inlines.
Therefore a kernel and everything that it calls stand in one file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numba
from numba import types as nb

from moesim.traces.compilation import input_array

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_R = TypeVar("_R")


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Copy the body of `function` into the kernels that call it.

    A compiled call in its place doubled the time of the greedy assignment (measured).
    """
    pasted: Callable[_P, _R] = numba.njit(inline="always")(function)
    return pasted


def called(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile `function` when a kernel of its file first calls it; keep it on disk."""
    # Without a signature: its types follow from the kernel that calls it.
    helper: Callable[_P, _R] = numba.njit(cache=True)(function)
    return helper


def joined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile `function` together with each `linked` kernel that calls it.

    It may take other such functions as arguments, and no file is kept for it.
    """
    piece: Callable[_P, _R] = numba.njit(function)
    return piece


KEYS = input_array(nb.int64)
"""Flat keys of experts, ``layer * experts + expert``."""

EXPERT_IDS = input_array(nb.int32)
"""Ids of experts within one layer, or their workloads."""

SECONDS = input_array(nb.float64)
"""One number per expert: seconds, or scores."""

SECONDS_BY_GPU = input_array(nb.float64, 2)
"""Seconds per GPU and expert."""

LANES = nb.int8[::1]
"""Chosen lane of each active expert."""

ORDER = nb.int64[::1]
"""Positions of the active experts in launch order."""

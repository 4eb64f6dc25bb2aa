"""How the loop is compiled: one machine program, kept on disk, of several files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numba
from numba import types as nb

from moesim.policies import kernels
from moesim.traces.compilation import linked

if TYPE_CHECKING:
    from collections.abc import Callable

PARTS = tuple(
    Path(__file__).with_name(f"{name}.py")
    for name in (
        "compilation",
        "host",
        "lanes",
        "loop",
        "memory",
        "planning",
        "records",
        "transfers",
        "world",
    )
)
"""Files that the loop is made of: a change in one of them compiles it anew."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def part(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a part of the loop together with it, callable from there alone."""
    piece: Any = numba.njit(
        no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy"
    )(function)
    template_of = piece.get_call_template

    def of_plain_numbers(arguments: Any, names: Any) -> Any:
        return template_of(tuple(map(_plain, arguments)), names)

    # Once, and not once more for each constant that it is called with.
    piece.get_call_template = of_plain_numbers
    return piece


def _plain(kind: Any) -> Any:
    """The type of an argument, without its value or its size as an integer."""
    kind = nb.unliteral(kind)
    return nb.int64 if isinstance(kind, nb.Integer) else kind


def entry(signature: Any) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compile the loop for `signature` at its first import, and keep it on disk."""
    return linked(signature, *PARTS, kernels)

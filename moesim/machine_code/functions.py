"""What marks a function for compilation, and what such functions may call besides each
other.

Nothing is compiled, and LLVM is not loaded, before a function is called or asked for
its address.
"""

from __future__ import annotations

import os
from functools import update_wrapper
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar, overload

from moesim.machine_code.types import Pointers, Signature, Structure

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

_P = ParamSpec("_P")
_R = TypeVar("_R")

INTERPRETED = os.environ.get("NUMBA_DISABLE_JIT", "0") not in {"", "0"}
"""Whether functions run as Python, so that one can step through them."""


class Function(Generic[_P, _R]):
    """A function that can be compiled.

    Attributes:
        python: as it was written.
        signature: of what Python and tables of addresses call; None for a part, which
            is compiled into whatever compiled function calls it.
    """

    __name__: str

    def __init__(self, python: Callable[_P, _R], signature: Signature | None) -> None:
        update_wrapper(self, python)
        self.python = python
        self.signature = signature
        runs_as_python = INTERPRETED or signature is None
        self._call: Callable[_P, _R] | None = python if runs_as_python else None

    def __call__(self, *arguments: _P.args, **options: _P.kwargs) -> _R:
        """Call the machine code, which is made or loaded at the first call."""
        call = self._call
        if call is None:
            # It knows this module, and LLVM takes a moment to load.
            library = import_module("moesim.machine_code.library")
            call = self._call = library.callable_from_python(self)
        return call(*arguments, **options)

    def __reduce__(self) -> str:
        """By name, as functions are pickled."""
        return self.python.__qualname__


@overload
def compiled(given: Callable[_P, _R]) -> Function[_P, _R]: ...
@overload
def compiled(
    given: Signature,
) -> Callable[[Callable[_P, _R]], Function[_P, _R]]: ...
def compiled(given: Any) -> Any:
    """Mark a function for compilation.

    ``@compiled(float64(int64[::1]))`` is for a function that Python or a table of
    addresses calls; ``@compiled`` alone for a part of others, for whatever types they
    call it with. Parts may take functions as arguments.
    """
    if not isinstance(given, Signature):
        return Function(given, None)

    def mark(python: Callable[_P, _R]) -> Function[_P, _R]:
        function = Function(python, given)
        MARKED.append(function)
        return function

    return mark


MARKED: list[Function[..., Any]] = []
"""Every function with a signature that has been imported, for whoever compiles ahead.
"""


_STRUCTURES: dict[type, Structure] = {}


def structure(cls: type, kinds: tuple[Any, ...]) -> Structure:
    """The type of a named tuple in signatures; both sides may make instances.

    It holds no reference to its arrays: whoever makes one keeps them.

    Args:
        cls: the named tuple.
        kinds: type of each field: a number, or a contiguous array.
    """
    made = Structure(cls, kinds)
    _STRUCTURES[cls] = made
    return made


def structure_of(cls: Any) -> Structure | None:
    """The structure that a class stands for, if it does."""
    return _STRUCTURES.get(cls) if isinstance(cls, type) else None


def _only_compiled() -> NoReturn:
    raise RuntimeError("addresses exist in machine code only")


def table_at(table: Pointers, address: int) -> Any:
    """The table of addresses that lies at one."""
    del table, address
    _only_compiled()


def address_of(table: Any) -> int:
    """The address of a table."""
    del table
    _only_compiled()


def loaded(cls: type, slots: np.ndarray) -> Any:
    """A structure by its slots, as `moesim.machine_code.types.slots_of` gives them."""
    del cls, slots
    _only_compiled()


def rows_at(row: np.ndarray, count: int, width: int) -> np.ndarray:
    """The beginning of a row of numbers, as an array of `count` rows."""
    return row[: count * width].reshape(count, width)


def call_address(address: int, *numbers: int) -> None:
    """Call the C function at an address, which takes whole numbers."""
    del address, numbers
    _only_compiled()

"""Machine code for loops that see every access of a trace, and for every decision of a
run.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numba
from numba import types as nb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

_P = ParamSpec("_P")
_R = TypeVar("_R")

# As numba loads its array functions it imports SciPy's BLAS, a sixth of a second and
# 14 MiB, which no loop of ours calls. One that does gets it when it is compiled.
_BLAS = "scipy.linalg.cython_blas"
if _BLAS not in sys.modules:
    sys.modules[_BLAS] = None  # type: ignore[assignment] # as if it were not there
    import numba.np.arraymath

    del sys.modules[_BLAS]


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


def linked(
    signature: Any, *modules: ModuleType | Path
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """As `compiled`, for a function that calls functions of other files.

    Args:
        signature: of the function.
        modules: whose functions it calls, on a detour too; or folders of such.
    """

    def compiler(function: Callable[_P, _R]) -> Callable[_P, _R]:
        if numba.config.DISABLE_JIT:
            return function
        dispatcher = numba.njit(cache=True)(function)
        # Numba looks at the function's own file; what is on disk counts only if all
        # that it was made of is the same.
        source = Path(function.__code__.co_filename)
        stamp = _digest([source, *map(_place, modules)])
        dispatcher._cache._cache_file._source_stamp = stamp  # noqa: SLF001 - no other way
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        program: Callable[_P, _R] = dispatcher
        return program

    return compiler


def _place(module: ModuleType | Path) -> Path:
    if isinstance(module, Path):
        return module
    assert module.__file__ is not None
    return Path(module.__file__)


def _digest(places: Iterable[Path]) -> str:
    """Digest of files, and of all modules in folders."""
    digest = hashlib.sha256()
    for place in places:
        files = sorted(place.glob("*.py")) if place.is_dir() else [place]
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()

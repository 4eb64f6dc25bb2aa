"""How the loop is compiled: one machine program, kept on disk, of several files."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numba
from numba import types as nb
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import cpu_target

from moesim.policies import kernels
from moesim.traces.compilation import linked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Code of a part for those that call it, and no machine code of its own.

    Numba would optimize and emit each part by itself, then within every part that calls
    it, and so on: half of the time that the loop takes to compile (measured).
    """

    @property
    def codegen(self) -> _PartLibrary:
        """Where numba puts the environment of a function that Python may call."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Nobody calls a part from Python."""

    def get_pointer_to_function(self, name: str) -> int:
        """No function of a part has an address."""
        del name
        self._ensure_finalized()
        return 0

    def _optimize_final_module(self) -> None:
        """Leave it to the program that the part becomes a part of."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@contextmanager
def _without_machine_code() -> Iterator[None]:
    """Compile parts, and what they call of numba's own, for others to link."""
    target = cpu_target.target_context.codegen()
    library_class = target._library_class  # noqa: SLF001 - numba has no setting for it
    target._library_class = _PartLibrary  # noqa: SLF001 - as above
    try:
        yield
    finally:
        target._library_class = library_class  # noqa: SLF001 - as above


def part(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a part of the loop together with it, callable from there alone."""
    piece: Any = numba.njit(
        no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy"
    )(function)
    template_of = piece.get_call_template
    compile_for = piece.compile

    def of_plain_numbers(arguments: Any, names: Any) -> Any:
        return template_of(tuple(map(_plain, arguments)), names)

    def to_be_linked(signature: Any) -> Any:
        with _without_machine_code():
            return compile_for(signature)

    # Once, and not once more for each constant that it is called with.
    piece.get_call_template = of_plain_numbers
    piece.compile = to_be_linked
    return piece


def _plain(kind: Any) -> Any:
    """The type of an argument, without its value or its size as an integer."""
    kind = nb.unliteral(kind)
    return nb.int64 if isinstance(kind, nb.Integer) else kind


def entry(signature: Any) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compile the loop for `signature` at its first import, and keep it on disk."""
    return linked(signature, *PARTS, kernels)

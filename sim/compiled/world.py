"""The world of a compiled run: one address, behind which all arrays and kernels lie.

The loop's parts hand it to each other. As arguments, arrays would be seven numbers
each, of which the compiler would have to move hundreds at every call: that made the
loop's machine code take minutes instead of seconds (measured).

For the loop, `world.state` and the like are plain arrays, and `world.run` a record.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types as nb
from numba.core import cgutils
from numba.core.typing import signature as signature_of
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_builtin,
    lower_getattr_generic,
    models,
    register_model,
)
from numba.np.arrayobj import make_array, populate_array

from moesim.policies.kernels import KERNELS as POLICY_KERNELS
from moesim.sim.compiled.records import ARRAYS, RECORDS
from moesim.traces.structures import array_at

ENTRIES = {
    "serve_worker": nb.void(nb.int64, nb.int64),
    "end_operation": nb.void(nb.int64, nb.int64),
    "plan_layer_step": nb.int64(nb.int64, nb.int64),
}
"""The loop's own parts that are compiled, and kept on disk, by themselves: one program
of all took the compiler twice as long (measured). Each takes the table's address.
"""

OF_CACHES = ("accessed", "admits", "precedence", "victims", "admitted", "evicted")
"""What the cache policy of any memory answers."""

_OF_HOST_CACHE = {f"host_{name}": POLICY_KERNELS[name] for name in OF_CACHES}

KERNELS = {**POLICY_KERNELS, **_OF_HOST_CACHE, **ENTRIES}
"""Everything that is called through the table."""

_INT = ir.IntType(64)
_ENTRY = 4
"""Numbers per array: its address and up to three sizes. A kernel needs no more."""


class _WorldType(nb.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("World")


WORLD = _WorldType()


def _array_type(dtype: Any, ndim: int) -> Any:
    return nb.Array(numba.from_dtype(np.dtype(dtype)), ndim, "C")


_TYPES: dict[str, Any] = {
    **{name: _array_type(*kind) for name, kind in ARRAYS.items()},
    **{name: numba.from_dtype(dtype) for name, dtype in RECORDS.items()},
}
_PLACES = {name: _ENTRY * place for place, name in enumerate([*_TYPES, *KERNELS])}


@register_model(_WorldType)
class _WorldModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _INT)


@infer_getattr
class _WorldAttributes(AttributeTemplate):  # type: ignore[misc]
    key = _WorldType

    def generic_resolve(self, _: Any, name: str) -> Any:
        if name in KERNELS:
            return nb.BoundFunction(_METHODS[name], WORLD)
        return _TYPES[name]


@intrinsic
def _world(_: Any, address: Any) -> Any:
    def code(__: Any, ___: Any, ____: Any, arguments: Any) -> Any:
        return arguments[0]

    return WORLD(address), code


@numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
def world_at(address: int) -> Any:
    """The world whose table lies at an address."""
    return _world(address)


@intrinsic
def address_of(_: Any, world: Any) -> Any:
    """The address of a world's table."""

    def code(__: Any, ___: Any, ____: Any, arguments: Any) -> Any:
        return arguments[0]

    return nb.int64(world), code


def _number(builder: Any, world: Any, place: int) -> Any:
    """Load one number of the table."""
    address = builder.add(world, ir.Constant(_INT, 8 * place))
    return builder.load(builder.inttoptr(address, _INT.as_pointer()))


@lower_getattr_generic(_WorldType)
def _load(context: Any, builder: Any, _: Any, world: Any, name: str) -> Any:
    if name in KERNELS:
        # A method: all that it needs is the world.
        return world
    kind = _TYPES[name]
    place = _PLACES[name]
    if name in RECORDS:
        value_type = context.get_value_type(kind)
        return builder.inttoptr(_number(builder, world, place), value_type)
    sizes = [_number(builder, world, place + 1 + n) for n in range(kind.ndim)]
    data_type = context.get_value_type(nb.CPointer(kind.dtype))
    data = builder.inttoptr(_number(builder, world, place), data_type)
    return array_at(context, builder, kind, data, sizes)


def _method(name: str, signature: Any) -> type[AbstractTemplate]:
    """Make a kernel callable as ``world.name(...)``.

    Numba's own values for functions bring code to every call that looks for another
    way to call them: half of all that was to be compiled (measured).
    """

    class Method(AbstractTemplate):  # type: ignore[misc]
        key = f"World.{name}"

        def generic(self, args: Any, kws: Any) -> Any:
            del args, kws
            return signature_of(signature.return_type, *signature.args, recvr=WORLD)

    @lower_builtin(Method.key, WORLD, *signature.args)
    def _call(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        world, *values = arguments
        convention = context.call_conv
        result, kinds = signature.return_type, signature.args
        function = builder.inttoptr(
            _number(builder, world, _PLACES[name]),
            convention.get_function_type(result, kinds).as_pointer(),
        )
        status, value = convention.call_function(
            builder, function, result, kinds, values
        )
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return value

    return Method


_METHODS = {name: _method(name, signature) for name, signature in KERNELS.items()}


@cache
def _address(kernel: Any, name: str) -> int:
    """Where a kernel's machine code lies."""
    program = kernel.get_compile_result(KERNELS[name])
    address: int = program.library.get_pointer_to_function(
        program.fndesc.llvm_func_name
    )
    return address


@intrinsic
def rows_at(_: Any, row: Any, count: Any, width: Any) -> Any:  # noqa: ARG001 - its types
    """The beginning of a row of numbers, as an array of `count` rows."""
    kind = nb.Array(row.dtype, 2, "C")

    def code(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        row_array = make_array(row)(context, builder, arguments[0])
        array = make_array(kind)(context, builder)
        itemsize = ir.Constant(
            _INT, context.get_abi_sizeof(row_array.data.type.pointee)
        )
        populate_array(
            array,
            data=row_array.data,
            shape=cgutils.pack_array(builder, arguments[1:]),
            strides=cgutils.pack_array(
                builder, [builder.mul(arguments[2], itemsize), itemsize]
            ),
            itemsize=itemsize,
            meminfo=None,
        )
        return array._getvalue()  # noqa: SLF001 - as above

    return kind(row, nb.int64, nb.int64), code


class World:
    """The arrays of a run, by name, and their table.

    Attributes:
        table: int64, what `world_at` wants the address of.
    """

    def __init__(self) -> None:
        self.table = np.zeros(_ENTRY * len(_PLACES), np.int64)
        self._arrays: dict[str, np.ndarray] = {}

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        """Give the loop an array; records are arrays of one."""
        dtype, ndim = ARRAYS[name] if name in ARRAYS else (RECORDS[name], 1)
        assert array.dtype == np.dtype(dtype), name
        assert array.ndim == ndim, name
        assert array.flags.c_contiguous, name
        place = _PLACES[name]
        self.table[place] = array.ctypes.data
        self.table[place + 1 : place + 1 + ndim] = array.shape
        # Kept alive as long as the loop may look at it.
        self._arrays[name] = array

    def give_kernel(self, name: str, kernel: Any) -> None:
        """Give the loop what it calls by this name, one of `KERNELS`."""
        self.table[_PLACES[name]] = _address(kernel, name)

    def __getitem__(self, name: str) -> np.ndarray:
        """An array of the loop."""
        return self._arrays[name]

"""Named tuples of arrays that compiled functions hand to each other cheaply.

Numba passes an array as seven numbers or more, so that a tuple of fifteen arrays is a
hundred of them, moved at every call. All but the address and the sizes are the same for
every array of a type: here only those are passed, and the rest is put back where an
array is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
from llvmlite import ir
from numba import types as nb
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)
from numba.np.arrayobj import make_array, populate_array

if TYPE_CHECKING:
    import numpy as np


class StructureType(nb.Type):  # type: ignore[misc]
    """Type of a named tuple of numbers and C-contiguous arrays.

    It holds no reference to its arrays: whoever makes one keeps them.

    Attributes:
        fields: name -> type of each.
    """

    def __init__(self, cls: type, fields: tuple[Any, ...]) -> None:
        self.fields = dict(zip(cls._fields, fields, strict=True))  # type: ignore[attr-defined]
        super().__init__(f"Structure({cls.__module__}.{cls.__qualname__})")


_KINDS: dict[type, StructureType] = {}


def structure(cls: type, fields: tuple[Any, ...]) -> StructureType:
    """The type of a named tuple in signatures of compiled functions; Python calls these
    with instances of `cls`.

    Args:
        cls: the named tuple.
        fields: the type of each field: a number, or a C-contiguous array.
    """
    kind = StructureType(cls, fields)

    def typeof(value: Any, _: Any) -> StructureType | None:
        # Addresses alone would not tell whether the right arrays lie there.
        fits = tuple(map(numba.typeof, value)) == fields
        return kind if fits else None

    typeof_impl.register(cls)(typeof)
    _KINDS[cls] = kind
    return kind


@intrinsic
def packed(_: Any, given: Any) -> Any:
    """The structure of a named tuple that a compiled function has made."""
    kind = _KINDS[given.instance_class]

    def code(context: Any, builder: Any, __: Any, values: Any) -> Any:
        fields = zip(
            cgutils.unpack_tuple(builder, values[0]),
            given.types,
            kind.fields.values(),
            strict=True,
        )
        cast = [context.cast(builder, *field) for field in fields]
        return _packed(context, builder, kind, cast)

    return kind(given), code


def numbers_of(arrays: tuple[np.ndarray, ...]) -> list[int]:
    """Addresses and sizes of a structure of arrays, as `loaded` takes them."""
    return [n for array in arrays for n in (array.ctypes.data, *array.shape)]


@intrinsic
def loaded(_: Any, cls: Any, numbers: Any) -> Any:
    """The structure of a named tuple of arrays, by its addresses and sizes.

    Args:
        cls: the named tuple.
        numbers: int64, as `numbers_of` gives them.
    """
    kind = _KINDS[cls.instance_class]

    def code(context: Any, builder: Any, __: Any, values: Any) -> Any:
        place = make_array(numbers)(context, builder, values[1]).data
        loads = iter(range(numbers.nitems))
        structure_of = cgutils.create_struct_proxy(kind)(context, builder)
        for name, field in kind.fields.items():
            for member in (name, *_sizes_of(name, field)):
                number = builder.load(cgutils.gep(builder, place, next(loads)))
                if member == name:
                    data_type = context.get_value_type(nb.CPointer(field.dtype))
                    number = builder.inttoptr(number, data_type)
                setattr(structure_of, member, number)
        return structure_of._getvalue()  # noqa: SLF001 - as below

    return kind(cls, numbers), code


def array_at(
    context: Any, builder: Any, kind: nb.Array, data: Any, sizes: list[Any]
) -> Any:
    """A C-contiguous array by its address and its sizes."""
    array = make_array(kind)(context, builder)
    itemsize = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    strides = [ir.Constant(ir.IntType(64), itemsize)]
    for size in sizes[:0:-1]:
        strides.insert(0, builder.mul(strides[0], size))
    populate_array(
        array,
        data=data,
        shape=cgutils.pack_array(builder, sizes),
        strides=cgutils.pack_array(builder, strides),
        itemsize=itemsize,
        meminfo=None,
    )
    return array._getvalue()  # noqa: SLF001 - how numba's own code asks


def _sizes_of(name: str, field: nb.Array) -> list[str]:
    return [f"{name}_{axis}" for axis in range(field.ndim)]


@register_model(StructureType)
class _Model(models.StructModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: StructureType) -> None:
        members: list[tuple[str, Any]] = []
        for name, field in kind.fields.items():
            if not isinstance(field, nb.Array):
                members.append((name, field))
                continue
            members.append((name, nb.CPointer(field.dtype)))
            members += [(size, nb.intp) for size in _sizes_of(name, field)]
        super().__init__(manager, kind, members)


@infer_getattr
class _Attributes(AttributeTemplate):  # type: ignore[misc]
    key = StructureType

    def generic_resolve(self, kind: StructureType, name: str) -> Any:
        return kind.fields.get(name)


@lower_getattr_generic(StructureType)
def _field(
    context: Any, builder: Any, kind: StructureType, value: Any, name: str
) -> Any:
    values = cgutils.create_struct_proxy(kind)(context, builder, value=value)
    field = kind.fields[name]
    if not isinstance(field, nb.Array):
        return getattr(values, name)
    sizes = [getattr(values, size) for size in _sizes_of(name, field)]
    return array_at(context, builder, field, getattr(values, name), sizes)


def _packed(context: Any, builder: Any, kind: StructureType, values: Any) -> Any:
    packed = cgutils.create_struct_proxy(kind)(context, builder)
    for (name, field), value in zip(kind.fields.items(), values, strict=True):
        if not isinstance(field, nb.Array):
            setattr(packed, name, value)
            continue
        array = make_array(field)(context, builder, value)
        setattr(packed, name, array.data)
        sizes = cgutils.unpack_tuple(builder, array.shape)
        for size_name, size in zip(_sizes_of(name, field), sizes, strict=True):
            setattr(packed, size_name, size)
    return packed._getvalue()  # noqa: SLF001 - as above


@unbox(StructureType)
def _from_python(kind: StructureType, tuple_object: Any, compiler: Any) -> NativeValue:
    context = compiler.context
    builder = compiler.builder
    values = []
    failed = cgutils.false_bit
    for place, field in enumerate(kind.fields.values()):
        item = compiler.pyapi.tuple_getitem(tuple_object, place)
        native = compiler.unbox(field, item)
        failed = builder.or_(failed, native.is_error)
        values.append(native.value)
        # The tuple itself keeps its arrays for as long as the call takes.
        if isinstance(field, nb.Array):
            context.nrt.decref(builder, field, native.value)
    packed = _packed(context, builder, kind, values)
    return NativeValue(packed, is_error=failed)

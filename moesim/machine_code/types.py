"""Types of compiled functions' arguments and results.

Written as ``int64[::1]`` for a contiguous array of one axis, ``float64[:, ::1]`` for
one of two, and ``void(int64[::1], float64)`` for a function's signature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_AXES = 3


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number or truth value, as memory holds it.

    Attributes:
        name: of the NumPy type; ``void`` for no result.
    """

    name: str

    @property
    def dtype(self) -> np.dtype:
        """The same for NumPy."""
        return np.dtype("bool" if self.name == "boolean" else self.name)

    def __call__(self, *arguments: Any) -> Signature:
        """Signature of a function that returns this."""
        return Signature(self, arguments)

    def __getitem__(self, axes: Any) -> Array:
        """Type of a contiguous array: one slice per axis, the last ``::1``."""
        axes = axes if isinstance(axes, tuple) else (axes,)
        assert [axis.step for axis in axes] == [None] * (len(axes) - 1) + [1]
        return Array(self, len(axes))


@dataclass(frozen=True, slots=True)
class Record:
    """A record with named fields, by address.

    Attributes:
        layout: NumPy's type of it, aligned.
    """

    layout: np.dtype

    @property
    def dtype(self) -> np.dtype:
        """The same for NumPy."""
        return self.layout

    def __getitem__(self, axes: Any) -> Array:
        """Type of a contiguous array of records."""
        axes = axes if isinstance(axes, tuple) else (axes,)
        return Array(self, len(axes))

    def __repr__(self) -> str:
        fields: Any = self.layout.fields or {}
        return f"Record({[(name, *map(str, field)) for name, field in fields.items()]})"


@dataclass(frozen=True, slots=True)
class Array:
    """A C-contiguous array.

    Attributes:
        element: type of its elements.
        ndim: axes.
        writeable: whether an argument must be; elements may be set only then.
    """

    element: Scalar | Record
    ndim: int
    writeable: bool = True

    def __call__(self, *arguments: Any) -> Signature:
        """Signature of a function that returns this."""
        return Signature(self, arguments)


@dataclass(frozen=True, slots=True)
class Structure:
    """A named tuple of numbers and arrays, passed by address.

    Attributes:
        cls: the named tuple.
        kinds: type of each field.
    """

    cls: type
    kinds: tuple[Scalar | Array, ...]

    def places(self) -> dict[str, tuple[int, Scalar | Array]]:
        """Name -> first of its 8-byte slots, and type. An array takes one for its
        address and one for each axis.
        """
        places = {}
        slot = 0
        for name, kind in zip(self.cls._fields, self.kinds, strict=True):  # type: ignore[attr-defined]
            places[name] = (slot, kind)
            slot += 1 + (kind.ndim if isinstance(kind, Array) else 0)
        return places

    def __repr__(self) -> str:
        return f"Structure({self.cls.__qualname__}, {self.places()})"


@dataclass(frozen=True, slots=True)
class Pointers:
    """A table of addresses that arrays and functions are looked up in by name.

    Attributes:
        name: of the table's type.
        places: name -> first of its 8-byte slots, and the type of what lies there: an
            array, a record or the signature of a function.
    """

    name: str
    places: dict[str, tuple[int, Any]]

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True, slots=True)
class Several:
    """Several results.

    Attributes:
        kinds: of each.
    """

    kinds: tuple[Any, ...]

    def __call__(self, *arguments: Any) -> Signature:
        """Signature of a function that returns these."""
        return Signature(self, arguments)


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes and returns."""

    result: Any
    arguments: tuple[Any, ...]


boolean = Scalar("boolean")
int8 = Scalar("int8")
int16 = Scalar("int16")
int32 = Scalar("int32")
int64 = Scalar("int64")
uint8 = Scalar("uint8")
uint16 = Scalar("uint16")
uint32 = Scalar("uint32")
uint64 = Scalar("uint64")
float32 = Scalar("float32")
float64 = Scalar("float64")
void = Scalar("void")


def input_array(element: Scalar | Record, ndim: int = 1) -> Array:
    """Type of a contiguous array that a function only reads."""
    return Array(element, ndim, writeable=False)


def slots_of(structure: tuple[Any, ...]) -> list[int]:
    """Addresses and sizes of a named tuple of arrays, as `loaded` takes them."""
    return [n for array in structure for n in (array.ctypes.data, *array.shape)]

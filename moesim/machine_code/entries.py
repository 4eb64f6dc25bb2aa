"""How compiled functions are entered: from a table of addresses, and from Python.

From Python every argument is an object. Arrays are read where NumPy's interface for C
says that they lie (`PyArrayObject`, the same since NumPy 1.7), and only if their type,
axes and layout are those of the signature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from moesim.machine_code.translate import (
    _ADDRESS,
    _F64,
    _I32,
    _I64,
    _REGISTERS,
    _VOID,
    Translation,
    _alloca,
    _gep,
    _registers,
    argument_kind,
    has_arrays,
)
from moesim.machine_code.types import (
    Array,
    Scalar,
    Several,
    Signature,
    Structure,
)

if TYPE_CHECKING:
    from moesim.machine_code.functions import Function

# Bytes from the beginning of a PyObject to its type, of a PyArrayObject to its fields,
# and of a PyTupleObject to its items.
_TYPE = 8
_DATA = 16
_AXES = 24
_SIZES = 32
_STEPS = 40
_DTYPE = 56
_FLAGS = 64
_ITEMS = 24

_C_CONTIGUOUS = 0x1
_ALIGNED = 0x100
_WRITEABLE = 0x400

ARRAY_CLASS = "moesim.ndarray"
"""Symbols of NumPy's objects: this, and ``moesim.int64`` and the like."""


def add_entries(translation: Translation, function: Function, name: str) -> None:
    """Make the functions ``name`` (for tables) and ``name.python``."""
    signature = function.signature
    assert signature is not None
    kinds = tuple(map(argument_kind, signature.arguments))
    inner, result = translation.function(function, kinds)
    if not has_arrays(result):
        _table_entry(translation, inner, name)
    _python_entry(translation, inner, result, signature, name)


def _table_entry(translation: Translation, inner: ir.Function, name: str) -> None:
    entry = ir.Function(translation.module, inner.function_type, name)
    builder = ir.IRBuilder(entry.append_basic_block())
    result = builder.call(inner, entry.args)
    if isinstance(inner.function_type.return_type, ir.VoidType):
        builder.ret_void()
    else:
        builder.ret(result)


class _PythonEntry:
    def __init__(
        self,
        translation: Translation,
        inner: ir.Function,
        result: Any,
        signature: Signature,
        name: str,
    ) -> None:
        self.t = translation
        self.by_slots = has_arrays(result) or isinstance(signature.result, Several)
        returned = _VOID
        if not self.by_slots and signature.result != Scalar("void"):
            returned = _REGISTERS[result]
            if result == "bool":
                returned = _I64
            elif result == "float32":
                returned = _F64
        parameters = [_ADDRESS] * (len(signature.arguments) + self.by_slots)
        self.function = ir.Function(
            translation.module, ir.FunctionType(returned, parameters), f"{name}.python"
        )
        self.b = ir.IRBuilder(self.function.append_basic_block())
        self.refused = self.function.append_basic_block()
        registers: list[Any] = []
        objects = self.function.args[self.by_slots :]
        for given, kind in zip(objects, signature.arguments, strict=True):
            registers += self._unboxed(given, kind)
        self._require_no_error()
        frame = None
        if has_arrays(result):
            frame = _alloca(self.b, _ADDRESS)
            self.b.store(ir.Constant(_ADDRESS, None), frame)
            registers.append(frame)
        made = self.b.call(inner, registers)
        if self.by_slots:
            self._to_slots(made, result, frame)
        elif returned is _VOID:
            self.b.ret_void()
        else:
            if result == "bool":
                made = self.b.zext(made, _I64)
            elif result == "float32":
                made = self.b.fpext(made, _F64)
            self.b.ret(made)
        self._refuse(returned)

    def _to_slots(self, made: Any, result: Any, frame: Any) -> None:
        """Leave the list of what is to be freed, and all registers, in slots."""
        b = self.b
        out = self.function.args[0]
        kinds = _registers(result)
        parts = [made]
        if len(kinds) > 1:
            parts = [b.extract_value(made, n) for n in range(len(kinds))]
        head = (
            ir.Constant(_ADDRESS, None)
            if frame is None
            else b.load(frame, typ=_ADDRESS)
        )
        b.store(head, out)
        for n, part in enumerate(parts):
            if part.type == ir.IntType(1):
                part = b.zext(part, _I64)
            slot = _gep(b, out, [ir.Constant(_I64, n + 1)], source_etype=_I64)
            b.store(part, slot)
        b.ret_void()

    def _refuse(self, returned: Any) -> None:
        b = self.b
        b.position_at_end(self.refused)
        occurred = self.t.external("PyErr_Occurred", _ADDRESS)
        none = b.icmp_unsigned("==", b.call(occurred, []), ir.Constant(_ADDRESS, None))
        with b.if_then(none):
            kind = b.load(self._global("PyExc_TypeError"), typ=_ADDRESS)
            b.call(self.t.external("PyErr_SetNone", _VOID, _ADDRESS), [kind])
        if returned is _VOID:
            b.ret_void()
        else:
            b.ret(ir.Constant(returned, 0))

    def _global(self, name: str) -> ir.GlobalVariable:
        if name in self.t.module.globals:
            return self.t.module.globals[name]
        made = ir.GlobalVariable(self.t.module, ir.IntType(8), name)
        made.linkage = "external"
        return made

    def _require(self, condition: Any) -> None:
        go_on = self.function.append_basic_block()
        self.b.cbranch(condition, go_on, self.refused)
        self.b.position_at_end(go_on)

    def _require_no_error(self) -> None:
        occurred = self.b.call(self.t.external("PyErr_Occurred", _ADDRESS), [])
        null = ir.Constant(_ADDRESS, None)
        self._require(self.b.icmp_unsigned("==", occurred, null))

    def _read(self, given: Any, offset: int, register: Any) -> Any:
        address = _gep(
            self.b, given, [ir.Constant(_I64, offset)], source_etype=ir.IntType(8)
        )
        return self.b.load(address, typ=register)

    def _unboxed(self, given: Any, kind: Any) -> list[Any]:
        if isinstance(kind, Scalar):
            return [self._number(given, kind)]
        if isinstance(kind, Array):
            return self._array(given, kind)
        assert isinstance(kind, Structure), kind
        return [self._structure(given, kind)]

    def _number(self, given: Any, kind: Scalar) -> Any:
        name = argument_kind(kind)
        if name == "bool":
            truth = self.t.external("PyObject_IsTrue", _I32, _ADDRESS)
            return self.b.icmp_signed(
                ">", self.b.call(truth, [given]), ir.Constant(_I32, 0)
            )
        if name in {"int", "uint"}:
            function = (
                "PyLong_AsLongLong" if name == "int" else "PyLong_AsUnsignedLongLong"
            )
            return self.b.call(self.t.external(function, _I64, _ADDRESS), [given])
        number = self.b.call(
            self.t.external("PyFloat_AsDouble", _F64, _ADDRESS), [given]
        )
        return self.b.fptrunc(number, ir.FloatType()) if name == "float32" else number

    def _array(self, given: Any, kind: Array) -> list[Any]:
        b = self.b
        is_array = b.icmp_unsigned(
            "==", self._read(given, _TYPE, _ADDRESS), self._global(ARRAY_CLASS)
        )
        self._require(is_array)
        axes = self._read(given, _AXES, _I32)
        self._require(b.icmp_signed("==", axes, ir.Constant(_I32, kind.ndim)))
        wanted = _C_CONTIGUOUS | _ALIGNED | (_WRITEABLE if kind.writeable else 0)
        flags = b.and_(self._read(given, _FLAGS, _I32), ir.Constant(_I32, wanted))
        self._require(b.icmp_signed("==", flags, ir.Constant(_I32, wanted)))
        if isinstance(kind.element, Scalar):
            dtype = self._global(f"moesim.{kind.element.name}")
            same = b.icmp_unsigned("==", self._read(given, _DTYPE, _ADDRESS), dtype)
            self._require(same)
        else:
            steps = self._read(given, _STEPS, _ADDRESS)
            step = self._read(steps, 8 * (kind.ndim - 1), _I64)
            size = ir.Constant(_I64, kind.element.dtype.itemsize)
            self._require(b.icmp_signed("==", step, size))
        sizes = self._read(given, _SIZES, _ADDRESS)
        return [
            self._read(given, _DATA, _ADDRESS),
            *(self._read(sizes, 8 * axis, _I64) for axis in range(kind.ndim)),
        ]

    def _structure(self, given: Any, kind: Structure) -> Any:
        places = kind.places()
        count = sum(
            1 + (field.ndim if isinstance(field, Array) else 0) for field in kind.kinds
        )
        slots = _alloca(self.b, _I64, count)
        for n, (slot, field) in enumerate(places.values()):
            item = self._read(given, _ITEMS + 8 * n, _ADDRESS)
            for m, register in enumerate(self._unboxed(item, field)):
                if register.type == ir.IntType(1):
                    register = self.b.zext(register, _I64)
                place = _gep(
                    self.b, slots, [ir.Constant(_I64, slot + m)], source_etype=_I64
                )
                self.b.store(register, place)
        return slots


def _python_entry(
    translation: Translation,
    inner: ir.Function,
    result: Any,
    signature: Signature,
    name: str,
) -> None:
    entry = _PythonEntry(translation, inner, result, signature, name)
    if entry.by_slots:
        freeing = ir.Function(
            translation.module, ir.FunctionType(_VOID, [_ADDRESS]), f"{name}.free"
        )
        builder = ir.IRBuilder(freeing.append_basic_block())
        builder.call(translation.releasing(), freeing.args)
        builder.ret_void()

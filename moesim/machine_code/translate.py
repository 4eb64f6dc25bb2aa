"""Translates functions in a part of Python into LLVM's language.

The part is what decisions on arrays need: numbers, arrays of up to three axes, records,
named tuples, `if`, `for`, `while`, and calls of other compiled functions. A function is
translated once for each combination of argument types. Whole numbers compute with 64
bits, whatever an array holds; indices may be negative, and are not checked.

Values live in LLVM's registers: an array is its address and sizes. What a function
allocates is freed when it returns, unless it returns an array: then it is its caller's.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from llvmlite import ir

from moesim.machine_code import sequences
from moesim.machine_code.functions import (
    Function,
    address_of,
    call_address,
    loaded,
    rows_at,
    structure_of,
    table_at,
)
from moesim.machine_code.types import (
    Array,
    Pointers,
    Record,
    Scalar,
    Several,
    Signature,
    Structure,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_I1 = ir.IntType(1)
_I8 = ir.IntType(8)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_F64 = ir.DoubleType()
_ADDRESS = ir.PointerType()
_VOID = ir.VoidType()

_REGISTERS = {"bool": _I1, "int": _I64, "uint": _I64, "float32": _F32, "float": _F64}
"""Kinds of numbers that functions compute with."""


class TranslationError(TypeError):
    """A function uses what cannot be compiled: file, line and the reason."""


# -- values ----------------------------------------------------------------------------


@dataclass(slots=True)
class Number:
    """A number in a register; `literal` is its value where the source says it."""

    kind: str
    ir: Any
    literal: Any = None


@dataclass(slots=True)
class Elements:
    """An array; strides, in elements, are None where it is contiguous."""

    element: Any
    data: Any
    sizes: list[Any]
    strides: list[Any] | None = None


@dataclass(slots=True)
class Item:
    """A record, structure or table, by address."""

    kind: Any
    address: Any


@dataclass(slots=True)
class Group:
    """Several values: a tuple."""

    items: list[Any]


@dataclass(slots=True)
class Static:
    """A Python object that is known when a function is translated."""

    value: Any


@dataclass(slots=True)
class Method:
    """A function of a table, to be called."""

    table: Item
    name: str


@dataclass(frozen=True, slots=True)
class _ArrayKind:
    element: Any
    ndim: int
    strided: bool


@dataclass(frozen=True, slots=True)
class _GroupKind:
    kinds: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _StaticKind:
    value: Any


def _kind_of(value: Any) -> Any:
    if isinstance(value, Number):
        return value.kind
    if isinstance(value, Elements):
        return _ArrayKind(value.element, len(value.sizes), value.strides is not None)
    if isinstance(value, Item):
        return value.kind
    if isinstance(value, Group):
        return _GroupKind(tuple(map(_kind_of, value.items)))
    assert isinstance(value, Static), value
    return _StaticKind(value.value)


def _flat(value: Any) -> list[Any]:
    """The registers that hold a value."""
    if isinstance(value, Number):
        return [value.ir]
    if isinstance(value, Elements):
        return [value.data, *value.sizes, *(value.strides or ())]
    if isinstance(value, Item):
        return [value.address]
    if isinstance(value, Group):
        return [register for item in value.items for register in _flat(item)]
    return []


def _registers(kind: Any) -> list[Any]:
    """Types of the registers that hold a value of a kind."""
    if isinstance(kind, str):
        return [_REGISTERS[kind]]
    if isinstance(kind, _ArrayKind):
        return [_ADDRESS] + [_I64] * (kind.ndim * (1 + kind.strided))
    if isinstance(kind, (Record, Structure, Pointers)):
        return [_ADDRESS]
    if isinstance(kind, _GroupKind):
        return [register for each in kind.kinds for register in _registers(each)]
    return []


def _value(kind: Any, registers: Iterator[Any]) -> Any:
    """Put a value of a kind together from its registers."""
    if isinstance(kind, str):
        return Number(kind, next(registers))
    if isinstance(kind, _ArrayKind):
        data = next(registers)
        sizes = [next(registers) for _ in range(kind.ndim)]
        strides = [next(registers) for _ in range(kind.ndim)] if kind.strided else None
        return Elements(kind.element, data, sizes, strides)
    if isinstance(kind, (Record, Structure, Pointers)):
        return Item(kind, next(registers))
    if isinstance(kind, _GroupKind):
        return Group([_value(each, registers) for each in kind.kinds])
    return Static(kind.value)


def _register_kind(scalar: Scalar) -> str:
    """The kind of number that an array's element becomes."""
    name = scalar.name
    if name == "boolean":
        return "bool"
    if name == "float32":
        return name
    if name == "float64":
        return "float"
    # Small unsigned numbers fit into signed ones; the others wrap around as they are.
    return "uint" if name in {"uint32", "uint64"} else "int"


def _memory_type(scalar: Scalar) -> Any:
    if scalar.name == "boolean":
        return _I8
    if scalar.name == "float32":
        return _F32
    if scalar.name == "float64":
        return _F64
    return ir.IntType(8 * scalar.dtype.itemsize)


def argument_kind(kind: Any) -> Any:
    """What a function sees of an argument of a type."""
    if isinstance(kind, Scalar):
        return _register_kind(kind)
    if isinstance(kind, Array):
        return _ArrayKind(kind.element, kind.ndim, strided=False)
    if isinstance(kind, Several):
        return _GroupKind(tuple(map(argument_kind, kind.kinds)))
    return kind


def has_arrays(kind: Any) -> bool:
    """Whether a result of a kind may lie in memory that somebody must free."""
    if isinstance(kind, _GroupKind):
        return any(map(has_arrays, kind.kinds))
    return isinstance(kind, (_ArrayKind, Array)) or (
        isinstance(kind, Several) and any(map(has_arrays, kind.kinds))
    )


def _gep(
    builder: ir.IRBuilder,
    address: Any,
    places: list[Any],
    inbounds: bool = True,
    *,
    source_etype: Any,
) -> Any:
    """An address behind another, by places of a type."""
    made = builder.gep(address, places, inbounds, source_etype=source_etype)
    # Addresses have no types in LLVM, but still here and there in llvmlite.
    made.type = _ADDRESS
    return made


def _alloca(builder: ir.IRBuilder, register: Any, count: int = 1) -> Any:
    """Room on the stack."""
    made = builder.alloca(register, count if count > 1 else None)
    made.type = _ADDRESS
    return made


# -- modules ---------------------------------------------------------------------------


@dataclass
class Translation:
    """One module: a function and all that it calls."""

    module: ir.Module = field(default_factory=lambda: ir.Module(name="moesim"))
    _made: dict[Any, tuple[ir.Function, Any]] = field(default_factory=dict)
    _sources: dict[Any, ast.FunctionDef] = field(default_factory=dict)
    _tags: dict[str, Any] = field(default_factory=dict)

    def function(self, function: Function, kinds: tuple[Any, ...]) -> Any:
        """A function for arguments of some kinds, and the kind of its result."""
        key = (function, kinds)
        if key not in self._made:
            # Recursion would need the result before it is known.
            self._made[key] = (None, None)
            self._made[key] = _Body(self, function, kinds).translate()
        made, result = self._made[key]
        if made is None:
            raise TranslationError(f"{function.__name__} calls itself")
        return made, result

    def source(self, function: Function) -> ast.FunctionDef:
        """A function's definition, with line numbers of its file."""
        if function not in self._sources:
            lines, first = inspect.getsourcelines(function.python)
            tree = ast.parse(textwrap.dedent("".join(lines)))
            ast.increment_lineno(tree, first - 1)
            definition = tree.body[0]
            assert isinstance(definition, ast.FunctionDef)
            self._sources[function] = definition
        return self._sources[function]

    def external(self, name: str, result: Any, *arguments: Any) -> ir.Function:
        """A function of the C library, or of Python's."""
        if name in self.module.globals:
            return self.module.globals[name]
        return ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def tag(self, name: str) -> Any:
        """What tells LLVM that memory of two names never overlaps."""
        if name not in self._tags:
            if "" not in self._tags:
                self._tags[""] = self.module.add_metadata(["moesim"])
            zero = ir.Constant(_I64, 0)
            kind = self.module.add_metadata([name, self._tags[""], zero])
            self._tags[name] = self.module.add_metadata([kind, kind, zero])
        return self._tags[name]

    def releasing(self) -> ir.Function:
        """The function that frees what hangs in a list."""
        name = "moesim.release"
        if name in self.module.globals:
            return self.module.globals[name]
        function = ir.Function(
            self.module, ir.FunctionType(_VOID, [_ADDRESS]), "moesim.release"
        )
        function.linkage = "internal"
        entry, loop, end = (function.append_basic_block() for _ in range(3))
        builder = ir.IRBuilder(entry)
        builder.branch(loop)
        builder.position_at_end(loop)
        block = builder.phi(_ADDRESS)
        block.add_incoming(function.args[0], entry)
        following = builder.append_basic_block()
        null = ir.Constant(_ADDRESS, None)
        builder.cbranch(builder.icmp_unsigned("==", block, null), end, following)
        builder.position_at_end(following)
        after = builder.load(block, typ=_ADDRESS)
        builder.call(self.external("free", _VOID, _ADDRESS), [block])
        block.add_incoming(after, following)
        builder.branch(loop)
        builder.position_at_end(end)
        builder.ret_void()
        return function


class _Body:
    """The body of one function, for arguments of some kinds."""

    def __init__(
        self, translation: Translation, function: Function, kinds: tuple[Any, ...]
    ) -> None:
        self.t = translation
        self.function = function
        self.kinds = kinds
        self.definition = translation.source(function)
        self.globals = inspect.getclosurevars(function.python)
        self.types: dict[str, Any] = {}
        self.result: Any = None
        self.changed = False
        self.node: ast.AST = self.definition

    def translate(self) -> tuple[ir.Function, Any]:
        """Translate until no variable's type changes any more."""
        declared = self.function.signature
        if declared is not None:
            if declared.result == Scalar("void"):
                self.result = _StaticKind(None)
            else:
                self.result = argument_kind(declared.result)
        while True:
            self.changed = False
            made = self._emit()
            if not self.changed:
                return made, self.result or _StaticKind(None)
            del self.t.module.globals[made.name]

    def fail(self, reason: str) -> NoReturn:
        code = self.function.python.__code__
        line = getattr(self.node, "lineno", code.co_firstlineno)
        raise TranslationError(
            f"{code.co_filename}:{line}: {self.function.__name__}: {reason}"
        )

    # -- frame -------------------------------------------------------------------------

    def _emit(self) -> ir.Function:
        parameters = [r for kind in self.kinds for r in _registers(kind)]
        returns_arrays = has_arrays(self.result)
        # A structure is built in its caller's memory.
        returns_slots = isinstance(self.result, Structure)
        registers = []
        if self.result is not None and not returns_slots:
            registers = _registers(self.result)
        result = _VOID
        if len(registers) == 1:
            result = registers[0]
        elif registers:
            result = ir.LiteralStructType(registers)
        hidden = [_ADDRESS] if returns_arrays or returns_slots else []
        name = self.t.module.get_unique_name(
            f"{self.function.python.__module__}.{self.function.__name__}"
        )
        made = ir.Function(
            self.t.module, ir.FunctionType(result, [*parameters, *hidden]), name
        )
        made.linkage = "internal"
        self.made = made
        self.entry = made.append_basic_block("entry")
        self.exit = made.append_basic_block("exit")
        start = made.append_basic_block("start")
        self.b = ir.IRBuilder(start)
        self.places: dict[str, list[Any]] = {}
        self.loops: list[tuple[Any, Any]] = []
        self.frame = made.args[-1] if returns_arrays else None
        self.results = [self._alloca(register) for register in registers]

        taken = iter(made.args)
        names = [argument.arg for argument in self.definition.args.args]
        if len(names) != len(self.kinds):
            self.fail(f"takes {len(names)} arguments, got {len(self.kinds)}")
        for argument, kind in zip(names, self.kinds, strict=True):
            self._set(argument, _value(kind, taken))
        self.block(self.definition.body)
        if not self.b.block.is_terminated:
            if self.result is not None and registers:
                self.node = self.definition
                # Every path that matters returns; LLVM may assume so.
                self.b.unreachable()
            else:
                self.b.branch(self.exit)
        with self.b.goto_block(self.entry):
            self.b.position_at_end(self.entry)
            self.b.branch(start)
        self.b.position_at_end(self.exit)
        if self.frame is not None and not returns_arrays:
            head = self.b.load(self.frame, typ=_ADDRESS)
            self.b.call(self.t.releasing(), [head])
        values = [
            self.b.load(place, typ=register)
            for place, register in zip(self.results, registers, strict=True)
        ]
        if not values:
            self.b.ret_void()
        elif len(values) == 1:
            self.b.ret(values[0])
        else:
            combined = ir.Constant(result, ir.Undefined)
            for n, each in enumerate(values):
                combined = self.b.insert_value(combined, each, n)
            self.b.ret(combined)
        return made

    def _alloca(self, register: Any, count: int = 1) -> Any:
        builder = ir.IRBuilder(self.entry)
        builder.position_at_start(self.entry)
        return _alloca(builder, register, count)

    def _frame(self) -> Any:
        """Where the list of what this function has allocated begins."""
        if self.frame is None:
            self.frame = self._alloca(_ADDRESS)
            builder = ir.IRBuilder(self.entry)
            builder.position_at_end(self.entry)
            builder.store(ir.Constant(_ADDRESS, None), self.frame)
        return self.frame

    # -- variables ---------------------------------------------------------------------

    def _set(self, name: str, value: Any) -> None:
        kind = _kind_of(value)
        known = self.types.get(name)
        if known is None:
            self.types[name] = known = kind
        joined = self._joined(known, kind)
        if joined != known:
            self.types[name] = joined
            self.changed = True
        if name not in self.places:
            self.places[name] = [self._alloca(r) for r in _registers(joined)]
        elif joined != known:
            # This round is thrown away; what was read before had another type.
            self.places[name] = [self._alloca(r) for r in _registers(joined)]
        value = self._as(value, joined)
        for place, register in zip(self.places[name], _flat(value), strict=True):
            self.b.store(register, place)

    def _joined(self, left: Any, right: Any) -> Any:
        if left == right:
            return left
        if isinstance(left, str) and isinstance(right, str):
            kinds = {left, right}
            if "float" in kinds or ("float32" in kinds and kinds != {"float32"}):
                return "float"
            if "uint" in kinds and "int" in kinds:
                self.fail("a variable holds signed and unsigned numbers")
            return "uint" if "uint" in kinds else "int"
        if isinstance(left, _ArrayKind) and isinstance(right, _ArrayKind):
            if (left.element, left.ndim) == (right.element, right.ndim):
                return _ArrayKind(left.element, left.ndim, strided=True)
        if isinstance(left, _GroupKind) and isinstance(right, _GroupKind):
            if len(left.kinds) == len(right.kinds):
                pairs = zip(left.kinds, right.kinds, strict=True)
                return _GroupKind(tuple(self._joined(*pair) for pair in pairs))
        self.fail(f"a variable holds both {left} and {right}")

    def _get(self, name: str) -> Any:
        if name in self.places:
            kind = self.types[name]
            registers = [
                self.b.load(place, typ=register)
                for place, register in zip(
                    self.places[name], _registers(kind), strict=True
                )
            ]
            return _value(kind, iter(registers))
        for scope in (
            self.globals.nonlocals,
            self.globals.globals,
            self.globals.builtins,
        ):
            if name in scope:
                return self.constant(scope[name])
        self.fail(f"unknown name {name!r}")

    def constant(self, value: Any) -> Any:
        """A Python object as a value."""
        if isinstance(value, (bool, np.bool_)):
            return Number("bool", ir.Constant(_I1, int(value)), bool(value))
        if isinstance(value, (np.uint32, np.uint64)):
            return Number("uint", ir.Constant(_I64, int(value)), int(value))
        if isinstance(value, (int, np.integer)):
            return Number("int", ir.Constant(_I64, int(value)), int(value))
        if isinstance(value, np.float32):
            return Number("float32", ir.Constant(_F32, float(value)), float(value))
        if isinstance(value, (float, np.floating)):
            return Number("float", ir.Constant(_F64, float(value)), float(value))
        if isinstance(value, tuple):
            return Group([self.constant(each) for each in value])
        return Static(value)

    # -- numbers -----------------------------------------------------------------------

    def _as(self, value: Any, kind: Any) -> Any:
        """A value converted to a kind that it fits into."""
        if _kind_of(value) == kind:
            return value
        if isinstance(kind, str):
            return self.number(value, kind)
        if isinstance(kind, _ArrayKind) and isinstance(value, Elements):
            if not kind.strided:
                self.fail("expected a contiguous array")
            return Elements(
                value.element, value.data, value.sizes, self._strides(value)
            )
        if isinstance(kind, _GroupKind) and isinstance(value, Group):
            pairs = zip(value.items, kind.kinds, strict=True)
            return Group([self._as(*pair) for pair in pairs])
        self.fail(f"expected {kind}, got {_kind_of(value)}")

    def number(self, value: Any, kind: str) -> Number:
        """A number as one of another kind."""
        if not isinstance(value, Number):
            self.fail(f"expected a number, got {_kind_of(value)}")
        if value.kind == kind:
            return value
        b = self.b
        if value.literal is not None and kind in {"int", "uint", "float"}:
            literal = float(value.literal) if kind == "float" else int(value.literal)
            return Number(kind, ir.Constant(_REGISTERS[kind], literal), literal)
        source = value.kind
        if kind == "bool":
            zero = ir.Constant(_REGISTERS[source], 0)
            if source.startswith("float"):
                return Number(kind, b.fcmp_unordered("!=", value.ir, zero))
            return Number(kind, b.icmp_signed("!=", value.ir, zero))
        if kind in {"int", "uint"}:
            if source == "bool":
                return Number(kind, b.zext(value.ir, _I64))
            if source in {"int", "uint"}:
                return Number(kind, value.ir)
            convert = b.fptosi if kind == "int" else b.fptoui
            return Number(kind, convert(value.ir, _I64))
        register = _REGISTERS[kind]
        if source in {"bool", "uint"}:
            return Number(kind, b.uitofp(value.ir, register))
        if source == "int":
            return Number(kind, b.sitofp(value.ir, register))
        change = b.fpext if kind == "float" else b.fptrunc
        return Number(kind, change(value.ir, register))

    def truth(self, value: Any) -> Any:
        """A value as one bit."""
        return self.number(value, "bool").ir

    def index(self, value: Any) -> Any:
        """A value as a whole number of 64 bits."""
        number = self.number(value, "int") if _kind_of(value) != "uint" else value
        if value.kind.startswith("float"):
            self.fail("expected a whole number")
        return number.ir

    def _common(self, left: Number, right: Number) -> str:
        kinds = {left.kind, right.kind}
        if kinds & {"float", "float32"}:
            return "float32" if kinds == {"float32"} else "float"
        if kinds == {"uint"}:
            return "uint"
        if "uint" in kinds:
            signed = left if left.kind != "uint" else right
            if signed.literal is None or signed.literal < 0:
                self.fail("signed and unsigned numbers are mixed; convert one")
            return "uint"
        return "int"

    def binary(self, operator: ast.operator, left: Any, right: Any) -> Any:
        """What an operator makes of two values."""
        if isinstance(left, Elements) or isinstance(right, Elements):
            return self.elementwise(
                left, right, lambda *pair: self.binary(operator, *pair)
            )
        if not (isinstance(left, Number) and isinstance(right, Number)):
            self.fail("expected numbers")
        b = self.b
        name = type(operator).__name__
        if name in {"BitAnd", "BitOr", "BitXor"}:
            kind = "bool" if left.kind == right.kind == "bool" else "int"
            if "uint" in {left.kind, right.kind}:
                kind = "uint"
            x = self.number(left, kind).ir
            y = self.number(right, kind).ir
            operation = {"BitAnd": b.and_, "BitOr": b.or_, "BitXor": b.xor}[name]
            return Number(kind, operation(x, y))
        if name in {"LShift", "RShift"}:
            kind = "uint" if left.kind == "uint" else "int"
            x, y = self.number(left, kind).ir, self.index(right)
            if name == "LShift":
                return Number(kind, b.shl(x, y))
            return Number(kind, (b.lshr if kind == "uint" else b.ashr)(x, y))
        kind = self._common(left, right)
        if name == "Div" and kind in {"int", "uint"}:
            kind = "float"
        if name == "Pow":
            return self._power(left, right, kind)
        x = self.number(left, kind).ir
        y = self.number(right, kind).ir
        if kind.startswith("float"):
            return Number(kind, self._float_operation(name, x, y))
        if name in {"Add", "Sub", "Mult"}:
            operation = {"Add": b.add, "Sub": b.sub, "Mult": b.mul}[name]
            literal = None
            if left.literal is not None and right.literal is not None:
                literal = {
                    "Add": left.literal + right.literal,
                    "Sub": left.literal - right.literal,
                    "Mult": left.literal * right.literal,
                }[name]
            return Number(kind, operation(x, y), literal)
        if name not in {"FloorDiv", "Mod"}:
            self.fail(f"operator {name}")
        return Number(kind, self._divided(name, x, y, kind, right.literal))

    def _divided(self, name: str, x: Any, y: Any, kind: str, literal: Any) -> Any:
        b = self.b
        zero = ir.Constant(_I64, 0)
        if not literal:
            # As NumPy: nothing is left of what is divided by nothing.
            none = b.icmp_signed("==", y, zero)
            y = b.select(none, ir.Constant(_I64, 1), y)
            x = b.select(none, zero, x)
        if kind == "uint":
            return b.udiv(x, y) if name == "FloorDiv" else b.urem(x, y)
        rest = b.srem(x, y)
        differs = b.icmp_signed("<", b.xor(rest, y), zero)
        adjusts = b.and_(b.icmp_signed("!=", rest, zero), differs)
        if name == "Mod":
            return b.select(adjusts, b.add(rest, y), rest)
        quotient = b.sdiv(x, y)
        return b.sub(quotient, b.zext(adjusts, _I64))

    def _float_operation(self, name: str, x: Any, y: Any) -> Any:
        b = self.b
        simple = {"Add": b.fadd, "Sub": b.fsub, "Mult": b.fmul, "Div": b.fdiv}
        if name in simple:
            return simple[name](x, y)
        if name not in {"FloorDiv", "Mod"}:
            self.fail(f"operator {name}")
        rest = b.frem(x, y)
        zero = ir.Constant(x.type, 0.0)
        differs = b.xor(b.fcmp_ordered("<", rest, zero), b.fcmp_ordered("<", y, zero))
        adjusts = b.and_(b.fcmp_ordered("!=", rest, zero), differs)
        if name == "Mod":
            return b.select(adjusts, b.fadd(rest, y), rest)
        rest = b.select(adjusts, b.fadd(rest, y), rest)
        quotient = b.fdiv(b.fsub(x, rest), y)
        return b.call(self.t.external("rint", _F64, _F64), [quotient])

    def _power(self, left: Number, right: Number, kind: str) -> Number:
        exponent = right.literal
        if isinstance(exponent, int) and 0 <= exponent <= 4:
            base = self.number(left, kind)
            result = self.number(self.constant(1), kind)
            for _ in range(exponent):
                result = self.binary(ast.Mult(), result, base)
            return result
        x = self.number(left, "float").ir
        y = self.number(right, "float").ir
        return Number("float", self.b.call(self._libm("pow", 2), [x, y]))

    def _libm(self, name: str, arguments: int = 1) -> ir.Function:
        return self.t.external(name, _F64, *[_F64] * arguments)

    def compare(self, operator: ast.cmpop, left: Any, right: Any) -> Any:
        """What a comparison says."""
        signs = {
            ast.Eq: "==",
            ast.NotEq: "!=",
            ast.Lt: "<",
            ast.LtE: "<=",
            ast.Gt: ">",
            ast.GtE: ">=",
        }
        if isinstance(left, Elements) or isinstance(right, Elements):
            return self.elementwise(
                left, right, lambda *pair: self.compare(operator, *pair)
            )
        if not (isinstance(left, Number) and isinstance(right, Number)):
            self.fail("only numbers and arrays are compared")
        sign = signs.get(type(operator))
        if sign is None:
            self.fail(f"comparison {type(operator).__name__}")
        kind = self._common(left, right)
        x = self.number(left, kind).ir
        y = self.number(right, kind).ir
        if kind.startswith("float"):
            # A comparison with NaN is false, and != is true.
            test = self.b.fcmp_unordered if sign == "!=" else self.b.fcmp_ordered
            return Number("bool", test(sign, x, y))
        test = self.b.icmp_unsigned if kind == "uint" else self.b.icmp_signed
        return Number("bool", test(sign, x, y))

    # -- memory ------------------------------------------------------------------------

    def _load(self, address: Any, scalar: Scalar, tag: str) -> Number:
        loaded_ = self.b.load(address, typ=_memory_type(scalar))
        loaded_.set_metadata("tbaa", self.t.tag(tag))
        return self._widened(loaded_, scalar)

    def _widened(self, register: Any, scalar: Scalar) -> Number:
        kind = _register_kind(scalar)
        if kind == "bool":
            zero = ir.Constant(_I8, 0)
            return Number(kind, self.b.icmp_unsigned("!=", register, zero))
        if kind in {"int", "uint"} and register.type != _I64:
            widen = self.b.zext if scalar.name.startswith("u") else self.b.sext
            return Number(kind, widen(register, _I64))
        return Number(kind, register)

    def _narrowed(self, value: Any, scalar: Scalar) -> Any:
        number = self.number(value, _register_kind(scalar))
        if number.kind == "bool":
            return self.b.zext(number.ir, _I8)
        memory = _memory_type(scalar)
        if number.kind in {"int", "uint"} and memory != _I64:
            return self.b.trunc(number.ir, memory)
        return number.ir

    def _store(self, address: Any, scalar: Scalar, value: Any, tag: str) -> None:
        stored = self.b.store(self._narrowed(value, scalar), address)
        stored.set_metadata("tbaa", self.t.tag(tag))

    def _itemsize(self, element: Any) -> int:
        return element.dtype.itemsize

    def _strides(self, array: Elements) -> list[Any]:
        """Elements between neighbours along each axis."""
        if array.strides is not None:
            return array.strides
        strides: list[Any] = [ir.Constant(_I64, 1)]
        for size in array.sizes[:0:-1]:
            last = strides[0]
            is_one = isinstance(last, ir.Constant) and last.constant == 1
            strides.insert(0, size if is_one else self.b.mul(last, size, flags=["nsw"]))
        return strides

    def _address(self, array: Elements, offset: Any) -> Any:
        """Address of the element at an offset, in elements."""
        element = array.element
        if isinstance(element, Scalar):
            return _gep(
                self.b, array.data, [offset], True, source_etype=_memory_type(element)
            )
        size = ir.Constant(_I64, self._itemsize(element))
        return _gep(
            self.b,
            array.data,
            [self.b.mul(offset, size, flags=["nsw"])],
            True,
            source_etype=_I8,
        )

    def _element(self, array: Elements, offset: Any) -> Any:
        address = self._address(array, offset)
        if isinstance(array.element, Record):
            return Item(array.element, address)
        return self._load(address, array.element, f"array.{array.element.name}")

    def _wrapped(self, value: Any, size: Any) -> Any:
        """An index that may count from the end."""
        if not isinstance(value, Number):
            self.fail("expected a whole number as index")
        place = self.index(value)
        if value.literal is not None:
            return place if value.literal >= 0 else self.b.add(place, size)
        if value.kind == "uint":
            return place
        negative = self.b.icmp_signed("<", place, ir.Constant(_I64, 0))
        return self.b.select(negative, self.b.add(place, size), place)

    def _bound(self, node: ast.expr | None, size: Any, default: Any) -> Any:
        """A bound of a slice, within the axis."""
        if node is None:
            return default
        value = self.expression(node)
        place = self._wrapped(value, size)
        zero = ir.Constant(_I64, 0)
        if value.literal is None or value.literal < 0:
            place = self.b.select(self.b.icmp_signed("<", place, zero), zero, place)
        over = self.b.icmp_signed(">", place, size)
        return self.b.select(over, size, place)

    def _gathered(self, array: Elements, places: Elements) -> Elements:
        """The elements of an array at some places."""
        if len(array.sizes) != 1 or len(places.sizes) != 1:
            self.fail("only arrays of one axis are indexed by another")
        if places.element == Scalar("boolean"):
            places = self.call(sequences.flatnonzero, [places])
        result = self.allocate(array.element, places.sizes)

        def at(_: Any, place: Number) -> Any:
            index = self._wrapped(place, array.sizes[0])
            return self._element(array, self._scaled(index, self._strides(array)[0]))

        self._pairwise(result, places, places, at)
        return result

    def indices(self, node: ast.expr) -> list[Any]:
        """The indices between brackets: values, and slices as they are written."""
        if isinstance(node, ast.Slice):
            return [node]
        if isinstance(node, ast.Tuple):
            return [each for item in node.elts for each in self.indices(item)]
        value = self.expression(node)
        return value.items if isinstance(value, Group) else [value]

    def view(self, array: Elements, indices: list[Any]) -> Any:
        """An element, a row or a slice of an array."""
        if len(indices) > len(array.sizes):
            self.fail(f"{len(array.sizes)} axes have {len(indices)} indices")
        strides = self._strides(array)
        offset: Any = None
        sizes: list[Any] = []
        kept: list[Any] = []
        contiguous = array.strides is None
        for n, size in enumerate(array.sizes):
            stride = strides[n]
            item = indices[n] if n < len(indices) else None
            if item is None or isinstance(item, ast.Slice):
                zero = ir.Constant(_I64, 0)
                low = zero
                high = size
                if item is not None:
                    if item.step is not None:
                        self.fail("slices have no step")
                    low = self._bound(item.lower, size, zero)
                    high = self._bound(item.upper, size, size)
                    if item.lower is not None or item.upper is not None:
                        # Only the first axis that is left may be cut.
                        contiguous = contiguous and not sizes
                    length = self.b.sub(high, low)
                    none = self.b.icmp_signed("<", length, zero)
                    length = self.b.select(none, zero, length)
                    if item.lower is not None:
                        offset = self._sum(offset, self._scaled(low, stride))
                    sizes.append(length)
                else:
                    sizes.append(size)
                kept.append(stride)
                continue
            contiguous = contiguous and not sizes
            index = self._wrapped(item, size)
            offset = self._sum(offset, self._scaled(index, stride))
        if offset is None:
            offset = ir.Constant(_I64, 0)
        if not sizes:
            return self._element(array, offset)
        data = self._address(array, offset)
        return Elements(array.element, data, sizes, None if contiguous else kept)

    def _scaled(self, place: Any, stride: Any) -> Any:
        if isinstance(stride, ir.Constant) and stride.constant == 1:
            return place
        return self.b.mul(place, stride, flags=["nsw"])

    def _sum(self, offset: Any, more: Any) -> Any:
        return more if offset is None else self.b.add(offset, more, flags=["nsw"])

    def allocate(self, element: Any, sizes: list[Any]) -> Elements:
        """A new array, not filled."""
        b = self.b
        count = sizes[0]
        for size in sizes[1:]:
            count = b.mul(count, size)
        nbytes = b.mul(count, ir.Constant(_I64, self._itemsize(element)))
        nbytes = b.add(nbytes, ir.Constant(_I64, 16))
        block = b.call(self.t.external("malloc", _ADDRESS, _I64), [nbytes])
        frame = self._frame()
        b.store(b.load(frame, typ=_ADDRESS), block)
        b.store(block, frame)
        data = _gep(b, block, [ir.Constant(_I64, 16)], True, source_etype=_I8)
        return Elements(element, data, sizes)

    def _total(self, array: Elements) -> Any:
        count = array.sizes[0]
        for size in array.sizes[1:]:
            count = self.b.mul(count, size)
        return count

    @contextmanager
    def counting(self, count: Any) -> Iterator[Any]:
        """A loop from 0 to a count."""
        b = self.b
        place = self._alloca(_I64)
        b.store(ir.Constant(_I64, 0), place)
        head, body, end = (self.made.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        n = b.load(place, typ=_I64)
        b.cbranch(b.icmp_signed("<", n, count), body, end)
        b.position_at_end(body)
        yield n
        b.store(b.add(n, ir.Constant(_I64, 1)), place)
        b.branch(head)
        b.position_at_end(end)

    def each(self, array: Elements) -> Any:
        """A loop over all offsets of an array's elements, first axis outermost."""
        return self._each(array, 0, None)

    @contextmanager
    def _each(self, array: Elements, axis: int, offset: Any) -> Iterator[Any]:
        strides = self._strides(array)
        with self.counting(array.sizes[axis]) as n:
            place = self._sum(offset, self._scaled(n, strides[axis]))
            if axis + 1 == len(array.sizes):
                yield place
            else:
                with self._each(array, axis + 1, place) as inner:
                    yield inner

    def fill(self, array: Elements, value: Any) -> None:
        """Set every element."""
        if not isinstance(array.element, Scalar):
            self.fail("records are set field by field")
        value = self.number(value, _register_kind(array.element))
        tag = f"array.{array.element.name}"
        with self.each(array) as offset:
            self._store(self._address(array, offset), array.element, value, tag)

    def copy_into(self, target: Elements, source: Elements) -> None:
        """Set every element to that of an array of the same sizes."""
        b = self.b
        if len(target.sizes) != len(source.sizes):
            self.fail("arrays of different axes")
        of_source = self._strides(source)
        of_target = self._strides(target)

        def along(axis: int, to: Any, of: Any) -> None:
            with self.counting(target.sizes[axis]) as n:
                to = self._sum(to, self._scaled(n, of_target[axis]))
                of = self._sum(of, self._scaled(n, of_source[axis]))
                if axis + 1 < len(target.sizes):
                    along(axis + 1, to, of)
                    return
                tag = f"array.{target.element.name}"
                self._store(
                    self._address(target, to),
                    target.element,
                    self._element(source, of),
                    tag,
                )

        del b
        along(0, None, None)

    # -- records, structures, tables ---------------------------------------------------

    def member(self, item: Item, name: str) -> Any:
        """A field of a record or structure, or what a table names."""
        kind = item.kind
        if isinstance(kind, Record):
            return self._field(item, name)
        places = kind.places() if isinstance(kind, Structure) else kind.places
        if name not in places:
            self.fail(f"{_name(kind)} has no {name!r}")
        slot, type_ = places[name]
        if isinstance(type_, Signature):
            return Method(item, name)
        if isinstance(type_, Scalar):
            return self._from_slot(self._slot(item, slot), type_)
        data = self._slot_value(item, slot, _ADDRESS)
        if isinstance(type_, (Record, Structure)):
            return Item(type_, data)
        sizes = [self._slot_value(item, slot + 1 + n, _I64) for n in range(type_.ndim)]
        return Elements(type_.element, data, sizes)

    def _slot(self, item: Item, slot: int) -> Any:
        return _gep(
            self.b, item.address, [ir.Constant(_I64, slot)], True, source_etype=_I64
        )

    def _slot_value(self, item: Item, slot: int, register: Any) -> Any:
        value = self.b.load(self._slot(item, slot), typ=register)
        if isinstance(item.kind, Pointers):
            # Nothing changes the table while a function runs.
            value.set_metadata("invariant.load", self.t.module.add_metadata([]))
        else:
            value.set_metadata("tbaa", self.t.tag("slot"))
        return value

    def _from_slot(self, address: Any, scalar: Scalar) -> Number:
        kind = _register_kind(scalar)
        register = _F64 if kind.startswith("float") else _I64
        value = self.b.load(address, typ=register)
        value.set_metadata("tbaa", self.t.tag("slot"))
        number = Number("float" if register is _F64 else "int", value)
        return self.number(number, kind) if kind != "uint" else Number(kind, value)

    def _to_slot(self, address: Any, scalar: Scalar, value: Any) -> None:
        kind = _register_kind(scalar)
        number = self.number(value, kind)
        number = self.number(number, "float" if kind.startswith("float") else "int")
        self.b.store(number.ir, address).set_metadata("tbaa", self.t.tag("slot"))

    def build(self, structure: Structure, values: Sequence[Any]) -> Item:
        """A structure of some values."""
        places = structure.places()
        if len(values) != len(places):
            self.fail(f"{_name(structure)} has {len(places)} fields")
        item = Item(structure, self._alloca(_I64, _slots(structure)))
        for value, (slot, kind) in zip(values, places.values(), strict=True):
            if isinstance(kind, Scalar):
                self._to_slot(self._slot(item, slot), kind, value)
                continue
            self._expect(value, kind)
            for n, register in enumerate(_flat(value)):
                stored = self.b.store(register, self._slot(item, slot + n))
                stored.set_metadata("tbaa", self.t.tag("slot"))
        return item

    def _copy_slots(self, target: Any, item: Item) -> None:
        for slot in range(_slots(item.kind)):
            value = self._slot_value(item, slot, _I64)
            place = self._slot(Item(item.kind, target), slot)
            self.b.store(value, place).set_metadata("tbaa", self.t.tag("slot"))

    def _expect(self, value: Any, kind: Array) -> None:
        expected = _ArrayKind(kind.element, kind.ndim, strided=False)
        if _kind_of(value) != expected:
            self.fail(f"expected {expected}, got {_kind_of(value)}")

    def _field(self, item: Item, name: str) -> Any:
        fields: Any = item.kind.layout.fields
        if name not in fields:
            self.fail(f"a record has no {name!r}")
        dtype, offset = fields[name][:2]
        address = _gep(
            self.b, item.address, [ir.Constant(_I64, offset)], True, source_etype=_I8
        )
        if dtype.subdtype is not None:
            dtype, sizes = dtype.subdtype
            return Elements(
                _scalar(dtype), address, [ir.Constant(_I64, size) for size in sizes]
            )
        return self._load(address, _scalar(dtype), f"field.{name}")

    def set_member(self, item: Any, name: str, value: Any) -> None:
        """Set a field of a record."""
        if not (isinstance(item, Item) and isinstance(item.kind, Record)):
            self.fail("only records and arrays can be changed")
        fields: Any = item.kind.layout.fields
        dtype, offset = fields[name][:2]
        address = _gep(
            self.b, item.address, [ir.Constant(_I64, offset)], True, source_etype=_I8
        )
        self._store(address, _scalar(dtype), value, f"field.{name}")

    # -- statements --------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if self.b.block.is_terminated:
                return
            self.node = statement
            name = type(statement).__name__.lower()
            method = getattr(self, f"_{name}", None)
            if method is None:
                self.fail(f"statement {type(statement).__name__} cannot be compiled")
            method(statement)

    def _expr(self, statement: ast.Expr) -> None:
        if not isinstance(statement.value, ast.Constant):
            self.expression(statement.value)

    def _pass(self, statement: ast.Pass) -> None:
        del statement

    def _assign(self, statement: ast.Assign) -> None:
        value = self.expression(statement.value)
        for target in statement.targets:
            self._assign_to(target, value)

    def _annassign(self, statement: ast.AnnAssign) -> None:
        assert statement.value is not None
        self._assign_to(statement.target, self.expression(statement.value))

    def _assign_to(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._set(target.id, value)
        elif isinstance(target, ast.Tuple):
            if isinstance(value, Elements):
                value = Group(
                    [
                        self._element(
                            value,
                            self._scaled(ir.Constant(_I64, n), self._strides(value)[0]),
                        )
                        for n in range(len(target.elts))
                    ]
                )
            if not isinstance(value, Group) or len(value.items) != len(target.elts):
                self.fail("as many names as values are needed")
            for each, item in zip(target.elts, value.items, strict=True):
                self._assign_to(each, item)
        elif isinstance(target, ast.Attribute):
            self.set_member(self.expression(target.value), target.attr, value)
        elif isinstance(target, ast.Subscript):
            array = self.expression(target.value)
            if not isinstance(array, Elements):
                self.fail("only elements of arrays can be set")
            self._assign_elements(array, target.slice, value)
        else:
            self.fail("cannot be assigned to")

    def _assign_elements(self, array: Elements, node: ast.expr, value: Any) -> None:
        indices = self.indices(node)
        place = self._place(array, indices)
        if place is None:
            part = self.view(array, indices)
            if isinstance(value, Elements):
                self.copy_into(part, value)
            else:
                self.fill(part, value)
            return
        self._store(place, array.element, value, f"array.{array.element.name}")

    def _place(self, array: Elements, indices: list[Any]) -> Any:
        """Address of one element; None where indices name several."""
        several = any(isinstance(item, ast.Slice) for item in indices)
        if several or len(indices) < len(array.sizes):
            return None
        strides = self._strides(array)
        offset: Any = None
        for item, size, stride in zip(indices, array.sizes, strides, strict=True):
            place = self._wrapped(item, size)
            offset = self._sum(offset, self._scaled(place, stride))
        return self._address(array, offset)

    def _augassign(self, statement: ast.AugAssign) -> None:
        target = statement.target
        if isinstance(target, ast.Name):
            value = self.expression(statement.value)
            before = self._get(target.id)
            if isinstance(before, Elements):
                self._change_all(statement.op, before, value)
                return
            self._set(target.id, self.binary(statement.op, before, value))
            return
        if isinstance(target, ast.Attribute):
            item = self.expression(target.value)
            before = self.member(item, target.attr)
            value = self.expression(statement.value)
            after = self.binary(statement.op, before, value)
            self.set_member(item, target.attr, after)
            return
        assert isinstance(target, ast.Subscript)
        array = self.expression(target.value)
        if not isinstance(array, Elements):
            self.fail("only elements of arrays can be set")
        indices = self.indices(target.slice)
        place = self._place(array, indices)
        value = self.expression(statement.value)
        if place is None:
            part = self.view(array, indices)
            self._change_all(statement.op, part, value)
            return
        tag = f"array.{array.element.name}"
        before = self._load(place, array.element, tag)
        after = self.binary(statement.op, before, value)
        self._store(place, array.element, after, tag)

    def elementwise(
        self, left: Any, right: Any, change: Callable[[Any, Any], Number]
    ) -> Elements:
        """A new array of what becomes of each pair of elements.

        Args:
            left, right: arrays of the same sizes, or one of them a number.
            change: of two numbers.
        """
        model = left if isinstance(left, Elements) else right
        kinds = [
            _register_kind(each.element) if isinstance(each, Elements) else each.kind
            for each in (left, right)
        ]
        # What kind of number comes out is known only when it does.
        probe = [Number(kind, ir.Constant(_REGISTERS[kind], 1)) for kind in kinds]
        with self._aside():
            result_kind = change(*probe).kind
        names = {"bool": "boolean", "int": "int64", "uint": "uint64"}
        same = all(isinstance(each, Elements) for each in (left, right))
        element = Scalar(names.get(result_kind, "float64"))
        if result_kind == "float32":
            element = Scalar("float32")
        if same and left.element == right.element and result_kind != "bool":
            element = left.element
        result = self.allocate(element, model.sizes)
        self._pairwise(result, left, right, change)
        return result

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Instructions of the block are thrown away."""
        here = self.b.block
        block = self.made.append_basic_block()
        self.b.position_at_end(block)
        yield
        self.made.blocks.remove(block)
        self.b.position_at_end(here)

    def _pairwise(
        self, target: Elements, left: Any, right: Any, change: Callable[[Any, Any], Any]
    ) -> None:
        """Set every element of an array to what becomes of two others."""

        def along(axis: int, places: list[Any]) -> None:
            with self.counting(target.sizes[axis]) as n:
                inner = [
                    self._sum(place, self._scaled(n, self._strides(array)[axis]))
                    if isinstance(array, Elements)
                    else None
                    for place, array in zip(places, (target, left, right), strict=True)
                ]
                if axis + 1 < len(target.sizes):
                    along(axis + 1, inner)
                    return
                pair = [
                    self._element(array, place)
                    if isinstance(array, Elements)
                    else array
                    for place, array in zip(inner[1:], (left, right), strict=True)
                ]
                self._store(
                    self._address(target, inner[0]),
                    target.element,
                    change(*pair),
                    f"array.{target.element.name}",
                )

        for each in (left, right):
            if isinstance(each, Elements) and len(each.sizes) != len(target.sizes):
                self.fail("arrays of different axes")
        along(0, [None, None, None])

    def _change_all(self, operator: ast.operator, part: Elements, value: Any) -> None:
        self._pairwise(part, part, value, lambda *pair: self.binary(operator, *pair))

    def _return(self, statement: ast.Return) -> None:
        if statement.value is not None:
            value = self.expression(statement.value)
            kind = _kind_of(value)
            if self.result is None:
                self.result = kind
                self.changed = True
            if isinstance(self.result, Structure):
                if kind != self.result:
                    self.fail(f"returns both {self.result} and {kind}")
                if not self.changed:
                    self._copy_slots(self.made.args[-1], value)
                self.b.branch(self.exit)
                return
            joined = self.result
            if self.function.signature is None:
                joined = self._joined(self.result, kind)
            if joined != self.result:
                self.result = joined
                self.changed = True
            if self.changed and len(self.results) != len(_registers(self.result)):
                self.b.branch(self.exit)
                return
            if isinstance(joined, _StaticKind) and joined.value is None:
                self.b.branch(self.exit)
                return
            registers = _flat(self._as(value, joined))
            for place, register in zip(self.results, registers, strict=True):
                self.b.store(register, place)
        self.b.branch(self.exit)

    def _if(self, statement: ast.If) -> None:
        test = self._condition(statement.test)
        if isinstance(test, Number) and test.literal is not None:
            self.block(statement.body if test.literal else statement.orelse)
            return
        yes = self.made.append_basic_block()
        no = self.made.append_basic_block() if statement.orelse else None
        end = self.made.append_basic_block()
        self.b.cbranch(self.truth(test), yes, no or end)
        self.b.position_at_end(yes)
        self.block(statement.body)
        if not self.b.block.is_terminated:
            self.b.branch(end)
        if no is not None:
            self.b.position_at_end(no)
            self.block(statement.orelse)
            if not self.b.block.is_terminated:
                self.b.branch(end)
        self.b.position_at_end(end)

    def _while(self, statement: ast.While) -> None:
        head, body, end = (self.made.append_basic_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch(self.truth(self._condition(statement.test)), body, end)
        self._loop(statement, body, head, end)

    def _loop(self, statement: Any, body: Any, again: Any, end: Any) -> None:
        self.b.position_at_end(body)
        self.loops.append((again, end))
        self.block(statement.body)
        self.loops.pop()
        if not self.b.block.is_terminated:
            self.b.branch(again)
        self.b.position_at_end(end)
        if statement.orelse:
            self.fail("a loop has no else")

    def _break(self, statement: ast.Break) -> None:
        del statement
        self.b.branch(self.loops[-1][1])

    def _continue(self, statement: ast.Continue) -> None:
        del statement
        self.b.branch(self.loops[-1][0])

    def _for(self, statement: ast.For) -> None:
        source = statement.iter
        b = self.b
        is_range = (
            isinstance(source, ast.Call)
            and isinstance(source.func, ast.Name)
            and source.func.id == "range"
        )
        zero = ir.Constant(_I64, 0)
        array: Any = None
        step: Any = ir.Constant(_I64, 1)
        falls = False
        if is_range:
            assert isinstance(source, ast.Call)
            bounds = [self.expression(each) for each in source.args]
            first = self.index(bounds[0]) if len(bounds) > 1 else zero
            last = self.index(bounds[1] if len(bounds) > 1 else bounds[0])
            if len(bounds) > 2:
                step = self.index(bounds[2])
                falls = (bounds[2].literal or 0) < 0
        else:
            array = self.expression(source)
            if isinstance(array, Group):
                self._for_each_of(statement, array)
                return
            if not isinstance(array, Elements):
                self.fail("only ranges and arrays are gone through")
            first = zero
            last = array.sizes[0]
        place = self._alloca(_I64)
        b.store(first, place)
        head, body, again, end = (self.made.append_basic_block() for _ in range(4))
        b.branch(head)
        b.position_at_end(head)
        n = b.load(place, typ=_I64)
        b.cbranch(b.icmp_signed(">" if falls else "<", n, last), body, end)
        b.position_at_end(body)
        if array is None:
            self._assign_to(statement.target, Number("int", n))
        else:
            offset = self._scaled(n, self._strides(array)[0])
            if len(array.sizes) == 1:
                item = self._element(array, offset)
            else:
                strides = None if array.strides is None else array.strides[1:]
                data = self._address(array, offset)
                item = Elements(array.element, data, array.sizes[1:], strides)
            self._assign_to(statement.target, item)
        body = b.block
        self._loop(statement, body, again, end)
        b.position_at_end(again)
        b.store(b.add(b.load(place, typ=_I64), step, flags=["nsw"]), place)
        b.branch(head)
        b.position_at_end(end)

    def _for_each_of(self, statement: ast.For, group: Group) -> None:
        """A loop over a tuple, written out."""
        end = self.made.append_basic_block()
        for item in group.items:
            again = self.made.append_basic_block()
            if isinstance(item, Number):
                item = Number(item.kind, item.ir)
            self._assign_to(statement.target, item)
            self.loops.append((again, end))
            self.block(statement.body)
            self.loops.pop()
            if not self.b.block.is_terminated:
                self.b.branch(again)
            self.b.position_at_end(again)
        self.b.branch(end)
        self.b.position_at_end(end)

    # -- expressions -------------------------------------------------------------------

    def expression(self, node: ast.expr) -> Any:
        method = getattr(self, f"_x_{type(node).__name__.lower()}", None)
        if method is None:
            self.fail(f"expression {type(node).__name__} cannot be compiled")
        return method(node)

    def _x_constant(self, node: ast.Constant) -> Any:
        return self.constant(node.value)

    def _x_name(self, node: ast.Name) -> Any:
        return self._get(node.id)

    def _x_tuple(self, node: ast.Tuple) -> Any:
        return Group([self.expression(each) for each in node.elts])

    _x_list = _x_tuple

    def _x_attribute(self, node: ast.Attribute) -> Any:
        value = self.expression(node.value)
        if isinstance(value, Static):
            if not hasattr(value.value, node.attr):
                self.fail(f"{value.value!r} has no {node.attr!r}")
            return self.constant(getattr(value.value, node.attr))
        if isinstance(value, Elements):
            if node.attr == "shape":
                return Group([Number("int", size) for size in value.sizes])
            if node.attr == "size":
                return Number("int", self._total(value))
            if node.attr == "T" and len(value.sizes) == 2:
                strides = self._strides(value)
                return Elements(
                    value.element, value.data, value.sizes[::-1], strides[::-1]
                )
            return Static((value, node.attr))
        if isinstance(value, Item):
            return self.member(value, node.attr)
        self.fail(f"{_kind_of(value)} has no {node.attr!r}")

    def _x_subscript(self, node: ast.Subscript) -> Any:
        value = self.expression(node.value)
        if isinstance(value, Elements):
            indices = self.indices(node.slice)
            if isinstance(indices[0], Elements):
                return self._gathered(value, indices[0])
            return self.view(value, indices)
        if isinstance(value, Group):
            place = self.expression(node.slice)
            if not isinstance(place, Number) or place.literal is None:
                self.fail("a tuple's index must be known")
            return value.items[place.literal]
        self.fail(f"{_kind_of(value)} has no elements")

    def _x_binop(self, node: ast.BinOp) -> Any:
        left = self.expression(node.left)
        return self.binary(node.op, left, self.expression(node.right))

    def _x_unaryop(self, node: ast.UnaryOp) -> Any:
        b = self.b
        negates = isinstance(node.op, ast.Not)
        value = (self._condition if negates else self.expression)(node.operand)
        if negates:
            literal = None
            if isinstance(value, Number) and value.literal is not None:
                literal = not value.literal
            return Number("bool", b.not_(self.truth(value)), literal)
        if isinstance(value, Elements):
            return self._unary_of_all(node.op, value)
        if not isinstance(value, Number):
            self.fail("expected a number")
        if isinstance(node.op, ast.UAdd):
            return value
        if isinstance(node.op, ast.USub):
            if value.literal is not None:
                return self.constant(-value.literal)
            if value.kind.startswith("float"):
                return Number(value.kind, b.fneg(value.ir))
            number = self.number(value, "int")
            return Number("int", b.neg(number.ir))
        if value.literal is not None and value.kind == "int":
            return self.constant(~value.literal)
        return Number(value.kind, b.not_(value.ir))

    def _unary_of_all(self, operator: ast.unaryop, array: Elements) -> Elements:
        result = self.allocate(array.element, array.sizes)
        self.copy_into(result, array)
        tag = f"array.{array.element.name}"
        with self.each(result) as offset:
            address = self._address(result, offset)
            value = self._load(address, array.element, tag)
            if isinstance(operator, ast.USub):
                negative = (
                    Number(value.kind, self.b.fneg(value.ir))
                    if value.kind.startswith("float")
                    else Number(value.kind, self.b.neg(value.ir))
                )
            else:
                negative = Number(value.kind, self.b.not_(value.ir))
            self._store(address, array.element, negative, tag)
        return result

    def _condition(self, node: ast.expr) -> Any:
        """An expression whose truth alone matters."""
        if isinstance(node, ast.BoolOp):
            return self._logical(node, is_value=False)
        return self.expression(node)

    def _x_boolop(self, node: ast.BoolOp) -> Any:
        return self._logical(node, is_value=True)

    def _logical(self, node: ast.BoolOp, *, is_value: bool) -> Any:
        is_and = isinstance(node.op, ast.And)
        place = self._alloca(_I1)
        end = self.made.append_basic_block()
        for n, each in enumerate(node.values):
            part = self.expression(each) if is_value else self._condition(each)
            if is_value and isinstance(part, Number) and part.kind != "bool":
                # In Python it is one of the numbers, here it would be true or false.
                self.fail("`and` or `or` of numbers; compare them with 0")
            value = self.truth(part)
            self.b.store(value, place)
            if n + 1 == len(node.values):
                self.b.branch(end)
                break
            more = self.made.append_basic_block()
            if is_and:
                self.b.cbranch(value, more, end)
            else:
                self.b.cbranch(value, end, more)
            self.b.position_at_end(more)
        self.b.position_at_end(end)
        return Number("bool", self.b.load(place, typ=_I1))

    def _x_compare(self, node: ast.Compare) -> Any:
        left = self.expression(node.left)
        result: Any = None
        for operator, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.expression(comparator)
            test = self.compare(operator, left, right)
            result = (
                test
                if result is None
                else Number("bool", self.b.and_(result.ir, test.ir))
            )
            left = right
        return result

    def _x_ifexp(self, node: ast.IfExp) -> Any:
        test = self._condition(node.test)
        if isinstance(test, Number) and test.literal is not None:
            return self.expression(node.body if test.literal else node.orelse)
        # Both ends must be one kind, which the first round finds out.
        yes, no, end = (self.made.append_basic_block() for _ in range(3))
        self.b.cbranch(self.truth(test), yes, no)
        values = []
        for block, part in ((yes, node.body), (no, node.orelse)):
            self.b.position_at_end(block)
            value = self.expression(part)
            values.append((value, self.b.block))
        kind = self._joined(_kind_of(values[0][0]), _kind_of(values[1][0]))
        places = [self._alloca(register) for register in _registers(kind)]
        for value, block in values:
            self.b.position_at_end(block)
            for place, register in zip(
                places, _flat(self._as(value, kind)), strict=True
            ):
                self.b.store(register, place)
            self.b.branch(end)
        self.b.position_at_end(end)
        registers = [
            self.b.load(place, typ=register)
            for place, register in zip(places, _registers(kind), strict=True)
        ]
        return _value(kind, iter(registers))

    # -- calls -------------------------------------------------------------------------

    def _x_call(self, node: ast.Call) -> Any:
        called = self.expression(node.func)
        arguments = [self.expression(each) for each in node.args]
        options = {
            str(option.arg): self.expression(option.value) for option in node.keywords
        }
        if isinstance(called, Method):
            return self._call_method(called, arguments)
        if not isinstance(called, Static):
            self.fail("cannot be called")
        target = called.value
        if isinstance(target, Function):
            names = target.python.__code__.co_varnames
            arguments += self._by_position(names[len(arguments) :], options)
            return self.call(target, arguments)
        if isinstance(target, tuple):
            array, name = target
            return self._array_method(array, name, arguments)
        structure = structure_of(target)
        if structure is not None:
            names = tuple(structure.places())
            arguments += self._by_position(names[len(arguments) :], options)
            return self.build(structure, arguments)
        try:
            made = _CALLS.get(target)
        except TypeError:
            made = None
        if made is None:
            self.fail(f"{getattr(target, '__name__', target)!r} cannot be called here")
        return made(self, *arguments, **options)

    def _by_position(self, names: Sequence[str], options: dict[str, Any]) -> list[Any]:
        """Values passed by keyword, in the order of the names that are left."""
        ordered = names[: len(options)]
        if set(ordered) != set(options):
            self.fail(f"expected the keywords {', '.join(ordered)}")
        return [options[name] for name in ordered]

    def call(self, function: Function, arguments: Sequence[Any]) -> Any:
        """Call another compiled function."""
        declared = function.signature
        values = []
        for n, value in enumerate(arguments):
            if declared is not None and isinstance(value, Number):
                kind = argument_kind(declared.arguments[n])
                value = self.number(value, kind)
            if isinstance(value, Number):
                value = Number(value.kind, value.ir)
            values.append(value)
        made, result = self.t.function(function, tuple(map(_kind_of, values)))
        registers = [register for value in values for register in _flat(value)]
        if has_arrays(result):
            registers.append(self._frame())
        elif isinstance(result, Structure):
            built = self._alloca(_I64, _slots(result))
            self.b.call(made, [*registers, built])
            return Item(result, built)
        returned = self.b.call(made, registers)
        kinds = _registers(result)
        if len(kinds) < 2:
            parts = [returned]
        else:
            parts = [self.b.extract_value(returned, n) for n in range(len(kinds))]
        return _value(result, iter(parts))

    def _call_method(self, method: Method, arguments: Sequence[Any]) -> Any:
        """Call a function by the address that a table holds."""
        slot, signature = method.table.kind.places[method.name]
        address = self._slot_value(method.table, slot, _ADDRESS)
        registers: list[Any] = []
        parameters: list[Any] = []
        for value, kind in zip(arguments, signature.arguments, strict=True):
            if isinstance(kind, Scalar):
                value = self.number(value, _register_kind(kind))
            elif isinstance(kind, Array):
                self._expect(value, kind)
            elif _kind_of(value) != kind:
                self.fail(f"expected {_name(kind)}, got {_kind_of(value)}")
            registers += _flat(value)
            parameters += _registers(_kind_of(value))
        kind = argument_kind(signature.result)
        result = _VOID if signature.result.name == "void" else _REGISTERS[kind]
        # The type of what is called tells LLVM what to pass.
        returned = self.b.call(
            _Callee(address, ir.FunctionType(result, parameters)), registers
        )
        return Static(None) if result is _VOID else Number(kind, returned)

    def _array_method(self, array: Elements, name: str, arguments: list[Any]) -> Any:
        if name == "copy":
            result = self.allocate(array.element, array.sizes)
            self.copy_into(result, array)
            return result
        if name == "fill":
            self.fill(array, arguments[0])
            return Static(None)
        if name in {"min", "max", "sum"}:
            return self._reduced(array, name)
        if name == "reshape":
            return self._reshaped(array, arguments)
        if name == "astype":
            element = Scalar(np.dtype(arguments[0].value).name)
            result = self.allocate(element, array.sizes)
            self.copy_into(result, array)
            return result
        self.fail(f"arrays have no {name!r} here")

    def _reduced(self, array: Elements, name: str) -> Number:
        kind = _register_kind(array.element)
        if name == "sum":
            kind = "int" if kind == "bool" else kind
            start = self.number(self.constant(0), kind)
        else:
            start = self._element(array, ir.Constant(_I64, 0))
        place = self._alloca(_REGISTERS[kind])
        self.b.store(start.ir, place)
        with self.each(array) as offset:
            value = self._element(array, offset)
            before = Number(kind, self.b.load(place, typ=_REGISTERS[kind]))
            if name == "sum":
                after = self.binary(ast.Add(), before, value)
            else:
                after = self._best(name, before, value)
            self.b.store(after.ir, place)
        return Number(kind, self.b.load(place, typ=_REGISTERS[kind]))

    def _best(self, name: str, left: Number, right: Number) -> Number:
        kind = left.kind if left.kind == right.kind else self._common(left, right)
        left, right = self.number(left, kind), self.number(right, kind)
        operator: ast.cmpop = ast.Gt() if name == "max" else ast.Lt()
        better = self.compare(operator, right, left)
        return Number(kind, self.b.select(better.ir, right.ir, left.ir))

    def _reshaped(self, array: Elements, arguments: list[Any]) -> Elements:
        if array.strides is not None:
            self.fail("only contiguous arrays are reshaped")
        if len(arguments) == 1 and isinstance(arguments[0], Group):
            arguments = arguments[0].items
        total = self._total(array)
        sizes = []
        for n, size in enumerate(arguments):
            if size.literal == -1:
                others = ir.Constant(_I64, 1)
                for m, right in enumerate(arguments):
                    if m != n:
                        others = self.b.mul(others, self.index(right))
                sizes.append(self.b.sdiv(total, others))
            else:
                sizes.append(self.index(size))
        return Elements(array.element, array.data, sizes)


class _Callee:
    """A function by its address, for `ir.IRBuilder.call`."""

    def __init__(self, address: Any, kind: ir.FunctionType) -> None:
        self._address = address
        self.function_type = kind
        self.ftype = kind
        self.type = address.type
        self.calling_convention = ""

    def get_reference(self) -> str:
        """How LLVM's language names it."""
        return str(self._address.get_reference())


def _slots(structure: Structure) -> int:
    """8-byte slots that a structure takes."""
    axes = sum(kind.ndim for kind in structure.kinds if isinstance(kind, Array))
    return len(structure.kinds) + axes


def _name(kind: Any) -> str:
    return str(getattr(getattr(kind, "cls", kind), "__name__", kind))


def _scalar(dtype: np.dtype) -> Scalar:
    return Scalar("boolean" if dtype == np.bool_ else dtype.name)


# -- what can be called ----------------------------------------------------------------


def _len(body: _Body, value: Any) -> Number:
    if isinstance(value, Group):
        return body.constant(len(value.items))
    if not isinstance(value, Elements):
        body.fail("only arrays and tuples have a length")
    return Number("int", value.sizes[0])


def _extreme(name: str) -> Callable[..., Any]:
    def made(body: _Body, *values: Any) -> Number:
        if len(values) == 1 and isinstance(values[0], Elements):
            return body._reduced(values[0], name)  # noqa: SLF001 - of this file
        best = values[0]
        for value in values[1:]:
            best = body._best(name, best, value)  # noqa: SLF001 - of this file
        return best

    return made


def _cast(scalar: Scalar) -> Callable[..., Any]:
    def made(body: _Body, value: Any) -> Number:
        number = body.number(value, _register_kind(scalar))
        memory = _memory_type(scalar)
        if number.kind in {"int", "uint"} and memory != _I64:
            narrow = body.b.trunc(number.ir, memory)
            return body._widened(narrow, scalar)  # noqa: SLF001 - of this file
        return Number(number.kind, number.ir)

    return made


def _to(kind: str) -> Callable[..., Any]:
    def made(body: _Body, value: Any) -> Number:
        if kind == "int" and isinstance(value, Number) and value.kind == "uint":
            return Number("int", value.ir)
        return body.number(value, kind)

    return made


def _libm(name: str, arguments: int = 1) -> Callable[..., Any]:
    def made(body: _Body, *values: Any) -> Number:
        numbers = [body.number(value, "float").ir for value in values]
        function = body._libm(name, arguments)  # noqa: SLF001 - of this file
        return Number("float", body.b.call(function, numbers))

    return made


def _intrinsic(name: str) -> Callable[..., Any]:
    def made(body: _Body, value: Any) -> Number:
        number = body.number(value, "float")
        function = body.t.external(f"llvm.{name}.f64", _F64, _F64)
        return Number("float", body.b.call(function, [number.ir]))

    return made


def _floor(name: str) -> Callable[..., Any]:
    """Down or up to a whole number, as `math` has it."""

    def made(body: _Body, value: Any) -> Number:
        return body.number(_intrinsic(name)(body, value), "int")

    return made


def _abs(body: _Body, value: Any) -> Number:
    if value.kind.startswith("float"):
        if value.kind == "float":
            return _intrinsic("fabs")(body, value)
        negative = body.b.fcmp_ordered("<", value.ir, ir.Constant(_F32, 0.0))
        return Number(
            "float32", body.b.select(negative, body.b.fneg(value.ir), value.ir)
        )
    number = body.number(value, "int")
    negative = body.b.icmp_signed("<", number.ir, ir.Constant(_I64, 0))
    return Number("int", body.b.select(negative, body.b.neg(number.ir), number.ir))


def _round(body: _Body, value: Any) -> Number:
    return body.number(_intrinsic("rint")(body, value), "int")


def _concatenate(body: _Body, parts: Any) -> Elements:
    total = parts.items[0].sizes[0]
    for part in parts.items[1:]:
        total = body.b.add(total, part.sizes[0])
    result = body.allocate(parts.items[0].element, [total])
    begin: Any = ir.Constant(_I64, 0)
    for part in parts.items:
        data = body._address(result, begin)  # noqa: SLF001 - of this file
        body.copy_into(Elements(result.element, data, part.sizes), part)
        begin = body.b.add(begin, part.sizes[0])
    return result


def _isnan(body: _Body, value: Any) -> Number:
    number = body.number(value, "float")
    return Number("bool", body.b.fcmp_unordered("uno", number.ir, number.ir))


def _isfinite(body: _Body, value: Any) -> Number:
    number = body.number(value, "float")
    size = _intrinsic("fabs")(body, number)
    return body.compare(ast.Lt(), size, body.constant(math.inf))


def _shape(body: _Body, value: Any) -> list[Any]:
    items = value.items if isinstance(value, Group) else [value]
    return [body.index(item) for item in items]


def _dtype(body: _Body, value: Any, default: str) -> Scalar:
    if value is None:
        return Scalar(default)
    if not isinstance(value, Static):
        body.fail("an array's type must be known")
    name = np.dtype(value.value).name
    return Scalar("boolean" if name == "bool" else name)


def _empty(body: _Body, shape: Any, dtype: Any = None) -> Elements:
    return body.allocate(_dtype(body, dtype, "float64"), _shape(body, shape))


def _zeros(body: _Body, shape: Any, dtype: Any = None) -> Elements:
    array = _empty(body, shape, dtype)
    body.fill(array, body.constant(0))
    return array


def _ones(body: _Body, shape: Any, dtype: Any = None) -> Elements:
    array = _empty(body, shape, dtype)
    body.fill(array, body.constant(1))
    return array


def _full(body: _Body, shape: Any, value: Any, dtype: Any = None) -> Elements:
    default = {"bool": "boolean", "int": "int64", "uint": "uint64"}
    element = _dtype(body, dtype, default.get(value.kind, "float64"))
    array = body.allocate(element, _shape(body, shape))
    body.fill(array, value)
    return array


def _arange(body: _Body, count: Any) -> Elements:
    array = body.allocate(Scalar("int64"), [body.index(count)])
    with body.counting(array.sizes[0]) as n:
        body._store(  # noqa: SLF001 - of this file
            body._address(array, n),  # noqa: SLF001 - of this file
            array.element,
            Number("int", n),
            "array.int64",
        )
    return array


def _array(body: _Body, values: Any, dtype: Any = None) -> Elements:
    if not isinstance(values, Group):
        body.fail("expected numbers in brackets")
    floats = any(item.kind.startswith("float") for item in values.items)
    element = _dtype(body, dtype, "float64" if floats else "int64")
    array = body.allocate(element, [ir.Constant(_I64, len(values.items))])
    for n, item in enumerate(values.items):
        body._store(  # noqa: SLF001 - of this file
            body._address(array, ir.Constant(_I64, n)),  # noqa: SLF001 - of this file
            element,
            item,
            f"array.{element.name}",
        )
    return array


def _elementwise(name: str) -> Callable[..., Any]:
    """The larger or the smaller of two arrays, place by place."""

    def made(body: _Body, left: Any, right: Any) -> Any:
        if isinstance(left, Number) and isinstance(right, Number):
            return body._best(name, left, right)  # noqa: SLF001 - of this file
        if len(left.sizes) > 1:
            body.fail("expected arrays of one dimension; loop over the others")
        result = body.allocate(left.element, left.sizes)
        with body.counting(left.sizes[0]) as n:
            pair = [
                body._element(  # noqa: SLF001 - of this file
                    each,
                    body._scaled(n, body._strides(each)[0]),  # noqa: SLF001
                )
                for each in (left, right)
            ]
            best = body._best(name, *pair)  # noqa: SLF001 - of this file
            body._store(  # noqa: SLF001 - of this file
                body._address(result, n),  # noqa: SLF001 - of this file
                result.element,
                best,
                f"array.{result.element.name}",
            )
        return result

    return made


def _written(function: Function) -> Callable[..., Any]:
    """A function of NumPy that is written out in `sequences`."""

    def made(body: _Body, *values: Any, **options: Any) -> Any:
        del options  # a stable sort is every kind of sort
        return body.call(function, values)

    return made


def _table_at(body: _Body, table: Any, address: Any) -> Item:
    pointer = body.b.inttoptr(body.index(address), _ADDRESS)
    return Item(table.value, pointer)


def _address_of(body: _Body, item: Any) -> Number:
    return Number("int", body.b.ptrtoint(item.address, _I64))


def _loaded(body: _Body, cls: Any, numbers: Any) -> Item:
    structure = structure_of(cls.value)
    assert structure is not None
    del body
    return Item(structure, numbers.data)


def _rows_at(body: _Body, row: Any, count: Any, width: Any) -> Elements:
    return Elements(row.element, row.data, [body.index(count), body.index(width)])


def _call_address(body: _Body, address: Any, *numbers: Any) -> Static:
    kind = ir.FunctionType(_VOID, [_I64] * len(numbers))
    pointer = body.b.inttoptr(body.index(address), _ADDRESS)
    body.b.call(_Callee(pointer, kind), [body.index(number) for number in numbers])
    return Static(None)


_CALLS: dict[Any, Callable[..., Any]] = {
    len: _len,
    min: _extreme("min"),
    max: _extreme("max"),
    abs: _abs,
    int: _to("int"),
    float: _to("float"),
    bool: _to("bool"),
    np.bool_: _to("bool"),
    np.float64: _to("float"),
    np.float32: _to("float32"),
    **{
        getattr(np, name): _cast(Scalar(name))
        for name in (
            "int8",
            "int16",
            "int32",
            "int64",
            "uint8",
            "uint16",
            "uint32",
            "uint64",
        )
    },
    math.exp: _libm("exp"),
    math.log: _libm("log"),
    math.log2: _libm("log2"),
    math.log1p: _libm("log1p"),
    math.cos: _libm("cos"),
    math.sin: _libm("sin"),
    math.pow: _libm("pow", 2),
    math.sqrt: _intrinsic("sqrt"),
    math.floor: _floor("floor"),
    math.ceil: _floor("ceil"),
    math.isnan: _isnan,
    math.isfinite: _isfinite,
    np.isnan: _isnan,
    np.isfinite: _isfinite,
    np.exp: _libm("exp"),
    np.log: _libm("log"),
    np.sqrt: _intrinsic("sqrt"),
    np.floor: _intrinsic("floor"),
    np.ceil: _intrinsic("ceil"),
    np.rint: _intrinsic("rint"),
    np.abs: _abs,
    np.empty: _empty,
    np.zeros: _zeros,
    np.ones: _ones,
    np.full: _full,
    np.arange: _arange,
    np.array: _array,
    np.concatenate: _concatenate,
    round: _round,
    np.maximum: _elementwise("max"),
    np.minimum: _elementwise("min"),
    np.argsort: _written(sequences.argsort),
    np.argmin: _written(sequences.argmin),
    np.flatnonzero: _written(sequences.flatnonzero),
    np.searchsorted: _written(sequences.searchsorted),
    table_at: _table_at,
    address_of: _address_of,
    loaded: _loaded,
    rows_at: _rows_at,
    call_address: _call_address,
}
"""Functions of Python and NumPy that compiled ones may call."""

"""Makes, loads and calls machine code."""

from __future__ import annotations

import ctypes
import hashlib
import math
import platform
import sys
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import llvmlite
import numpy as np
from llvmlite import binding as llvm

from moesim.machine_code import store
from moesim.machine_code.functions import Function, structure_of
from moesim.machine_code.types import Array, Scalar, Several, Structure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_ARRAYS: list[str] = """
boolean int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64
""".split()
_FROM_C: list[str] = """
malloc free memset memcpy memmove exp log log2 log1p cos sin pow fmod rint
""".split()
_FROM_PYTHON = (
    "PyErr_Occurred",
    "PyErr_SetNone",
    "PyFloat_AsDouble",
    "PyLong_AsLongLong",
    "PyLong_AsUnsignedLongLong",
    "PyObject_IsTrue",
)


class _Engine:
    """LLVM's engine of this process: every object that is loaded, and where."""

    def __init__(self) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.cpu = llvm.get_host_cpu_name()
        self.features = llvm.get_host_cpu_features().flatten()
        self._engine = llvm.create_mcjit_compiler(
            llvm.parse_assembly(""), self.machine(level=2)
        )
        library = ctypes.CDLL(None)
        for names, place in ((_FROM_C, library), (_FROM_PYTHON, ctypes.pythonapi)):
            for name in names:
                address = ctypes.cast(getattr(place, name), ctypes.c_void_p).value
                assert address is not None
                llvm.add_symbol(name, address)
        error = ctypes.c_void_p.in_dll(ctypes.pythonapi, "PyExc_TypeError")
        llvm.add_symbol("PyExc_TypeError", ctypes.addressof(error))
        llvm.add_symbol("moesim.ndarray", id(np.ndarray))
        for name in _ARRAYS:
            llvm.add_symbol(f"moesim.{name}", id(Scalar(name).dtype))

    def machine(self, level: int) -> Any:
        """What makes code for this processor."""
        target = llvm.Target.from_default_triple()
        return target.create_target_machine(
            opt=level, cpu=self.cpu, features=self.features, jit=True
        )

    def load(self, code: bytes) -> None:
        """Load an object."""
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Where a function lies."""
        place: int = self._engine.get_function_address(name)
        assert place, name
        return place


@cache
def _engine() -> _Engine:
    return _Engine()


# -- digests ---------------------------------------------------------------------------


@cache
def _compiler_digest() -> bytes:
    """Digest of what makes machine code, and of the processor that it is for."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    engine = _engine()
    about = (
        llvmlite.__version__,
        llvm.get_default_triple(),
        engine.cpu,
        engine.features,
        sys.implementation.cache_tag,
        platform.machine(),
    )
    digest.update(repr(about).encode())
    return digest.digest()


def digest_of(function: Function) -> str:
    """Digest of all that a function's machine code depends on."""
    digest = hashlib.sha256(_compiler_digest())
    seen: set[int] = set()

    def add(each: Function) -> None:
        if id(each) in seen:
            return
        seen.add(id(each))
        code = each.python.__code__
        # By the code, not by the file: nobody minds a changed docstring elsewhere.
        constants = code.co_consts[1:] if each.python.__doc__ else code.co_consts
        about = (each.python.__module__, each.__name__, each.signature, constants)
        digest.update(repr((about, code.co_names, code.co_varnames)).encode())
        digest.update(code.co_code)
        scope = each.python.__globals__
        cells = each.python.__closure__ or ()
        for name, cell in zip(code.co_freevars, cells, strict=True):
            add_value(name, cell.cell_contents)
        for name in code.co_names:
            if name not in scope:
                continue
            value = scope[name]
            if isinstance(value, ModuleType):
                if value.__name__.partition(".")[0] in {"numpy", "math"}:
                    continue
                for attribute in code.co_names:
                    if hasattr(value, attribute):
                        add_value(attribute, getattr(value, attribute))
            else:
                add_value(name, value)

    def add_value(name: str, value: Any) -> None:
        if isinstance(value, Function):
            add(value)
        elif isinstance(value, type):
            digest.update(repr((name, structure_of(value))).encode())
        elif not isinstance(value, ModuleType) and not callable(value):
            digest.update(repr((name, value)).encode())

    add(function)
    return digest.hexdigest()


# -- making ----------------------------------------------------------------------------


_loaded: dict[Function, str] = {}
"""Functions whose code is loaded, and the names that it has there."""

compiled: list[str] = []
"""Names of the functions that this process has compiled."""

SILENT = 4
"""Functions that are compiled, 0.1 s each, before a line says what takes so long."""

_waited_s = 0.0
_announced = False


def announce(name: str, about_s: float) -> None:
    """Say on standard error, once in a process, what is being waited for."""
    global _announced  # noqa: PLW0603 - of this process
    if not _announced:
        _announced = True
        place = store.folder()
        kept = "" if place is None else f"; kept in {place}"
        line = f"compiling {name}, once, about {math.ceil(about_s)} s{kept}"
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def say_nothing() -> None:
    """Leave it to others to say what is being waited for."""
    global _announced  # noqa: PLW0603 - as above
    _announced = True


def _name(digest: str) -> str:
    return f"f{digest[:24]}"


def make(function: Function, digest: str) -> bytes:
    """Compile a function.

    Raises:
        TranslationError: it uses what cannot be compiled.
    """
    # A fifth of a second that later runs need not pay.
    from moesim.machine_code.entries import add_entries  # noqa: PLC0415
    from moesim.machine_code.translate import Translation  # noqa: PLC0415

    global _waited_s  # noqa: PLW0603 - of this process
    begin_s = time.process_time()
    if len(compiled) >= SILENT:
        announce("what this run needs", 4 * _waited_s)
    compiled.append(function.__name__)
    translation = Translation()
    add_entries(translation, function, _name(digest))
    module, machine = optimised(str(translation.module))
    code: bytes = machine.emit_object(module)
    _waited_s += time.process_time() - begin_s
    return code


def optimised(text: str) -> tuple[Any, Any]:
    """A module in LLVM's language, optimised, and the machine that it is for."""
    module = llvm.parse_assembly(text)
    module.verify()
    machine = _engine().machine(level=2)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module, machine


def assembled(name: str, text: str) -> int:
    """Where a function lies that is written in LLVM's language.

    Args:
        name: of the function.
        text: the module that defines it.
    """
    digest = hashlib.sha256(_compiler_digest() + text.encode()).hexdigest()
    code = store.read(digest)
    if code is None:
        module, machine = optimised(text)
        code = machine.emit_object(module)
        store.write(digest, code)
    _engine().load(code)
    return _engine().address(name)


def missing(functions: Iterable[Function]) -> list[Function]:
    """Those of some functions whose machine code is neither loaded nor on disk."""
    return [
        function
        for function in functions
        if function not in _loaded and store.read(digest_of(function)) is None
    ]


def load(functions: Iterable[Function]) -> None:
    """Load functions, and make those first that are not on disk."""
    for function in functions:
        if function in _loaded:
            continue
        digest = digest_of(function)
        code = store.read(digest)
        if code is None:
            with store.alone(digest):
                # Another process may have made it while this one waited.
                code = store.read(digest)
                if code is None:
                    code = make(function, digest)
                    store.write(digest, code)
        _engine().load(code)
        _loaded[function] = _name(digest)


def address(function: Function) -> int:
    """Where a function's machine code lies, for tables of addresses."""
    load([function])
    return _engine().address(_loaded[function])


# -- calls from Python -----------------------------------------------------------------


def callable_from_python(function: Function) -> Callable[..., Any]:
    """A function whose machine code is called with Python's objects."""
    load([function])
    signature = function.signature
    assert signature is not None
    arguments = [ctypes.py_object] * len(signature.arguments)
    at = _engine().address(f"{_loaded[function]}.python")
    if isinstance(signature.result, (Array, Several)):
        entry: Any = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, *arguments)(at)
        return _checked(function, _taking_results(function, entry))
    name = signature.result.name
    result: Any = {"void": None, "boolean": ctypes.c_bool, "uint64": ctypes.c_uint64}
    kind = result.get(
        name, ctypes.c_double if name.startswith("float") else ctypes.c_int64
    )
    return _checked(function, ctypes.PYFUNCTYPE(kind, *arguments)(at))


def _checked(function: Function, entry: Callable[..., Any]) -> Callable[..., Any]:
    count = len(function.signature.arguments)  # type: ignore[union-attr]
    names = function.python.__code__.co_varnames[:count]

    def call(*arguments: Any, **options: Any) -> Any:
        if options:
            arguments = (
                *arguments,
                *(options[name] for name in names[len(arguments) :]),
            )
        try:
            return entry(*arguments)
        except TypeError:
            if len(arguments) != count:
                raise TypeError(
                    f"{function.__name__} takes {count} arguments, got {len(arguments)}"
                ) from None
        return entry(*_fitting(function, names, arguments))

    return call


def _fitting(
    function: Function, names: Sequence[str], arguments: Sequence[Any]
) -> list[Any]:
    """Arguments as machine code wants them.

    Raises:
        TypeError: one is of another type.
    """
    assert function.signature is not None
    fitting = []
    for name, kind, value in zip(
        names, function.signature.arguments, arguments, strict=True
    ):
        fits = value
        if isinstance(kind, Structure):
            fits = kind.cls(
                *(
                    _fitting_one(function, f"{name}.{part}", each, item)
                    for part, each, item in zip(
                        kind.cls._fields,  # type: ignore[attr-defined]
                        kind.kinds,
                        value,
                        strict=True,
                    )
                )
            )
        else:
            fits = _fitting_one(function, name, kind, value)
        fitting.append(fits)
    return fitting


def _fitting_one(function: Function, name: str, kind: Any, value: Any) -> Any:
    if isinstance(kind, Scalar):
        if isinstance(value, (bool, int, float, np.bool_, np.number)):
            return value
        expected = kind.name
    else:
        dtype = kind.element.dtype
        flags = getattr(value, "flags", None)
        fits = (
            flags is not None
            and value.dtype == dtype
            and value.ndim == kind.ndim
            and flags.c_contiguous
            and (flags.writeable or not kind.writeable)
        )
        if fits:
            # A type that is equal and another object, or a class of arrays.
            return np.asarray(value).view(dtype)
        change = " that can be changed" if kind.writeable else ""
        expected = f"contiguous {dtype} array of {kind.ndim} axes{change}"
    got = type(value).__name__
    if isinstance(value, np.ndarray):
        got = f"{value.dtype} array of {value.ndim} axes"
        if not value.flags.c_contiguous:
            got += " that is not contiguous"
    raise TypeError(f"{function.__name__}: {name}: expected {expected}, got {got}")


def _taking_results(
    function: Function, entry: Callable[..., Any]
) -> Callable[..., Any]:
    """Copy results that lie in memory of machine code, and free that."""
    assert function.signature is not None
    result = function.signature.result
    kinds = result.kinds if isinstance(result, Several) else (result,)
    count = 1 + sum(1 + (k.ndim if isinstance(k, Array) else 0) for k in kinds)
    slots_type = ctypes.c_int64 * count
    free = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(
        _engine().address(f"{_loaded[function]}.free")
    )

    def call(*arguments: Any) -> Any:
        slots = slots_type()
        entry(slots, *arguments)
        place = 1
        taken: list[Any] = []
        for kind in kinds:
            if isinstance(kind, Array):
                shape = tuple(slots[place + 1 : place + 1 + kind.ndim])
                array = np.empty(shape, kind.element.dtype)
                ctypes.memmove(array.ctypes.data, slots[place], array.nbytes)
                taken.append(array)
                place += 1 + kind.ndim
                continue
            if kind.name.startswith("float"):
                number = ctypes.c_double.from_buffer(slots, 8 * place).value
                taken.append(number)
            else:
                number = slots[place]
                taken.append(bool(number) if kind.name == "boolean" else number)
            place += 1
        free(slots[0])
        return tuple(taken) if isinstance(result, Several) else taken[0]

    return call

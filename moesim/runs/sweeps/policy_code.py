"""Digests the code that a policy reaches, so that no policy is given the results
of another.

What runs is what counts: code objects in memory, wherever they come from (a file, a
cell of a notebook, `exec`), and the values that they refer to. The text of their
modules counts as well, for what a module did when it was imported. Libraries count by
name only.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moesim.policies.base import Policy

# What cannot be pickled, and the attributes that say what it is.
_WRAPPERS: dict[Any, tuple[str, ...]] = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    type(functools.cache(len)): ("__wrapped__",),
    GetSetDescriptorType: ("__name__",),
}

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))

# What a class has beside its code, some of it other in every process.
_NOT_CODE = {
    *("__dict__", "__weakref__", "__module__", "__doc__", "_abc_impl"),
    *("__static_attributes__", "__firstlineno__", "__annotations_cache__"),
    *("__dataclass_fields__", "__dataclass_params__"),
    # The registry sets it: what a policy is called decides nothing.
    "name",
}

# Code that uses one of these may run or read what nobody can see beforehand.
_HIDDEN = {
    *("exec", "eval", "open", "read_text", "read_bytes", "load", "fromfile"),
    *("loadtxt", "genfromtxt", "__import__", "import_module", "globals"),
}


class _HiddenError(Exception):
    """Something that cannot be digested."""


def policy_code_digest(cls: type[Policy]) -> str | None:
    """SHA-256 of the code that a policy's class reaches.

    Equal code gives equal digests in every process of the same Python.

    Returns:
        The digest; None where the policy may do what cannot be seen beforehand: it
        reads files by itself, runs text, or holds an object that cannot be copied.
    """
    walk = _Walk(cls.__module__.partition(".")[0])
    try:
        walk.add(cls)
    # Whatever an object of somebody else's raises while it is taken apart.
    except Exception:  # noqa: BLE001 - it cannot be digested then
        return None
    return walk.digest.hexdigest()


class _Walk:
    """Visits everything that an object reaches.

    Args:
        home: package of the policy, which is no library, even where it is installed.
    """

    def __init__(self, home: str) -> None:
        self.digest = hashlib.sha256()
        self._home = home
        # Objects are kept, as the identity of one that is gone may come back.
        self._seen: dict[int, tuple[int, Any]] = {}
        self._modules: set[tuple[int, frozenset[str]]] = set()

    def add(self, value: Any) -> None:
        """Digest a value and what it reaches."""
        kind = type(value)
        if kind in _PLAIN:
            self._note(kind.__name__, repr(value))
        elif kind is tuple:
            self._note("tuple", len(value))
            for item in value:
                self.add(item)
        elif kind is CodeType:
            self._code(value)
        elif id(value) in self._seen:
            self._note("seen", self._seen[id(value)][0])
        else:
            self._seen[id(value)] = (len(self._seen), value)
            self._object(value)

    def _note(self, *facts: object) -> None:
        self.digest.update(repr(facts).encode("utf-8", "surrogatepass"))

    def _object(self, value: Any) -> None:
        if isinstance(value, type):
            self._class(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, ModuleType):
            self._reached(value, frozenset(vars(value)))
        elif isinstance(value, set | frozenset):
            self._note("set", sorted(self._alone(item) for item in value))
        elif isinstance(value, dict | MappingProxyType):
            self._note("dict")
            for item in value.items():
                self.add(item)
        else:
            self._parts(value)

    def _alone(self, value: Any) -> str:
        walk = _Walk(self._home)
        walk.add(value)
        return walk.digest.hexdigest()

    def _parts(self, value: Any) -> None:
        """Digest an object as what it would be pickled as."""
        self._note("object", type(value).__module__, type(value).__qualname__)
        for kind, names in _WRAPPERS.items():
            if isinstance(value, kind):
                self.add(tuple(getattr(value, name) for name in names))
                return
        parts = value.__reduce_ex__(4)
        if isinstance(parts, str):
            self._note("name", parts)
            return
        for part in parts:
            # Items of lists and dicts come as iterators.
            is_iterator = hasattr(part, "__next__")
            self.add(list(part) if is_iterator else part)

    def _values(self, values: Mapping[str, Any]) -> None:
        for name in sorted(values):
            if name not in _NOT_CODE:
                self._note(name)
                self.add(values[name])

    def _class(self, cls: type) -> None:
        if self._is_of_library(cls):
            self._note("class", cls.__module__, cls.__qualname__)
            return
        # Where a class is defined may be lost on its way to another process.
        self._note("class", cls.__name__)
        self._source(cls.__module__)
        self.add((type(cls), *cls.__bases__))
        self._values(vars(cls))

    def _function(self, function: FunctionType) -> None:
        if self._is_of_library(function):
            self._note("function", function.__module__, function.__qualname__)
            return
        self._note("function", function.__name__)
        self._source(function.__module__)
        self.add(function.__code__)
        self.add((function.__defaults__, function.__kwdefaults__))
        self.add(function.__annotations__)
        for cell in function.__closure__ or ():
            self.add(cell.cell_contents)
        self._values(vars(function))

        names = frozenset(_names(function.__code__))
        if hidden := names & _HIDDEN:
            raise _HiddenError(hidden)
        for name in sorted(names & function.__globals__.keys()):
            self._note(name)
            self._reached(function.__globals__[name], names)
        for module in _imported(function):
            self._reached(module, names)

    def _reached(self, value: Any, names: frozenset[str]) -> None:
        """Digest what code refers to; of a module, the names that the code has."""
        if not isinstance(value, ModuleType):
            self.add(value)
            return
        self._note("module", value.__name__)
        if self._is_library(value.__name__) or (id(value), names) in self._modules:
            return
        self._modules.add((id(value), names))
        self._source(value.__name__)
        if "getattr" in names or "__dict__" in names:
            raise _HiddenError(value.__name__)
        for name in sorted(names & vars(value).keys()):
            self._note(name)
            self._reached(vars(value)[name], names)

    def _code(self, code: CodeType) -> None:
        self._note(
            *(code.co_code, code.co_exceptiontable, code.co_flags, code.co_names),
            *(code.co_varnames, code.co_freevars, code.co_cellvars),
            *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        )
        for constant in code.co_consts:
            self.add(constant)

    def _source(self, module: str) -> None:
        """Digest the text of a module; a script is another module in each process."""
        file = getattr(sys.modules.get(module), "__file__", None)
        if module != "__main__" and file is not None and Path(file).is_file():
            self._note(hashlib.sha256(Path(file).read_bytes()).hexdigest())

    def _is_of_library(self, value: type | FunctionType) -> bool:
        """Whether a class or function is what its library's module calls so."""
        if isinstance(value, type) and not _is_of_python(value):
            return True
        # What `exec` makes may claim any module.
        module = sys.modules.get(str(value.__module__))
        if module is None or not self._is_library(module.__name__):
            return False
        if isinstance(value, FunctionType):
            file = getattr(module, "__file__", None)
            if file is not None and value.__code__.co_filename == file:
                return True
        part: Any = module
        for name in value.__qualname__.split("."):
            part = getattr(part, name, None)
        return part is value

    def _is_library(self, module: str) -> bool:
        top = module.partition(".")[0]
        if top in (self._home, "__main__"):
            return top == "moesim"
        return _is_installed(module)


def _is_of_python(cls: type) -> bool:
    """Whether a class may have been made by Python code."""
    return bool(cls.__flags__ & 1 << 9)  # Py_TPFLAGS_HEAPTYPE


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether a module is Python's, of an installed package, or of moesim."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("builtins", "moesim"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    # Several folders may hold packages: of the environment, of the user, of the system.
    folders = {"site-packages", "dist-packages"}
    return file is not None and not folders.isdisjoint(Path(file).parts)


def _names(code: CodeType) -> Iterator[str]:
    """Names that code and the functions in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _imported(function: FunctionType) -> list[ModuleType]:
    """Modules that a function imports when it runs."""
    package = function.__globals__.get("__package__")
    codes = [function.__code__]
    modules = []
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        steps = [
            step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"
        ]
        for place, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                # The level and the names come before.
                name = "." * steps[place - 2].argval + step.argval
                resolved = importlib.util.resolve_name(name, package)
                modules.append(importlib.import_module(resolved))
    return modules

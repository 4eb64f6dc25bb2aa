"""Checks the types of arguments where users call: a wrong one is named before anything
is done with it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from moesim.base.options import is_list

Function = TypeVar("Function", bound=Callable[..., Any])

_MOST_SHOWN = 60
_KINDS: dict[str, Any] = {
    "str": str,
    "bytes": bytes,
    "bool": bool,
    "int": Integral,
    "float": Real,
    "Path": Path,
    "PathLike": os.PathLike,
    "Callable": Callable,
    "Mapping": Mapping,
    "type": type,
}
_ITEMS_CHECKED = 1_000

# No classes; whoever takes them checks them.
_ANYTHING = ("Any", "Machine", "Residual")

# Options of a run say more about a wrong value: who takes several, for example.
_OPTIONS = ("trace", "policy", "hw")


@functools.cache
def with_checked_arguments(function: Function) -> Function:
    """The function, refusing arguments that do not fit their annotations.

    Annotations may name classes that are imported for type checkers only, so classes
    are compared by name. Arguments without an annotation of their own, such as options
    of a run, are left to whoever takes them.

    Raises:
        TypeError: when called, naming the function, the argument, what is expected and
            what was given.
    """
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__
    positional = code.co_varnames[: code.co_argcount]
    takes_options = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    wanted = {
        name: ast.parse(annotation, mode="eval").body
        for name, annotation in function.__annotations__.items()
        if name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        and not (takes_options and name in _OPTIONS)
    }

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        # A missing or unknown argument is named by whoever takes it.
        for name, value in [*zip(positional, arguments, strict=False), *named.items()]:
            if name in wanted:
                _check(value, wanted[name], f"{function.__name__}: {name}")
        return function(*arguments, **named)

    # Pickled by the name under which users know it.
    checked.__module__ = "moesim"
    return checked  # type: ignore[return-value]


def _check(value: Any, wanted: ast.expr, where: str) -> None:
    if not _fits(value, wanted):
        words = ast.unparse(wanted).replace("'", "")
        shown = repr(value)
        if len(shown) > _MOST_SHOWN:
            shown = shown[:_MOST_SHOWN] + "…"
        raise TypeError(f"{where}: expected {words}, got {shown}")


def _fits(value: Any, wanted: ast.expr) -> bool:
    if isinstance(wanted, ast.BinOp):
        return _fits(value, wanted.left) or _fits(value, wanted.right)
    if isinstance(wanted, ast.Constant):
        return value is None
    if isinstance(wanted, ast.Subscript):
        return _fits(value, wanted.value) and _items_fit(value, wanted)
    name = wanted.attr if isinstance(wanted, ast.Attribute) else ast.unparse(wanted)
    return name in _ANYTHING or _is_of_kind(value, name)


def _is_of_kind(value: Any, name: str) -> bool:
    """Whether a value is of a class, by the class's name."""
    if name == "Sequence":
        # An array or the keys of a dictionary may be walked and counted as well.
        return is_list(value) and not isinstance(value, bytes | Mapping)
    if name == "tuple":
        return isinstance(value, tuple | list)
    kind = _KINDS.get(name)
    if kind is None:
        return name in {each.__name__ for each in type(value).__mro__}
    # Python counts truth values among the integers.
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _items_fit(value: Any, wanted: ast.Subscript) -> bool:
    """Whether a container holds what it should."""
    name = ast.unparse(wanted.value)
    if name == "Sequence":
        items = islice(value, _ITEMS_CHECKED)
        return all(_fits(item, wanted.slice) for item in items)
    if name == "Mapping" and isinstance(wanted.slice, ast.Tuple):
        key, item = wanted.slice.elts
        return all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    return True

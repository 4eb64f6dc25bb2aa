"""Checked constructor arguments for policies, from command-line text or TOML values.

A policy's parameters are the keyword arguments of its `__init__`, with their
annotations and defaults. Nothing is declared twice.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import types
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from moesim.policies.base import PolicyError

if TYPE_CHECKING:
    from collections.abc import Mapping

REQUIRED = inspect.Parameter.empty
"""Stands for the default of a parameter that has none."""

# Spellings of truth values on the command line, compared in lower case.
_TRUTH_VALUES: dict[str, bool] = {
    "true": True,
    "yes": True,
    "on": True,
    "false": False,
    "no": False,
    "off": False,
}

# Narrow types are tried first: as `bool` before `int`, and a number before a text.
_TRY_ORDER = (type(None), bool, int, float)


class Parameter(NamedTuple):
    """One constructor argument: `accepts` is its annotation, `default` may be
    `REQUIRED`.
    """

    name: str
    accepts: Any
    default: Any

    @property
    def type_label(self) -> str:
        """The accepted types in words: ``int or none``, ``id, fifo or lru``."""
        return _label(self.accepts)


def expect(holds: bool, name: str, expected: str, got: object) -> None:
    """Check a parameter in a policy's `__init__`.

    Raises:
        PolicyError: `holds` is false; the text reads ``name: expected …, got …``.
    """
    if not holds:
        raise PolicyError(f"{name}: expected {expected}, got {got!r}")


def expect_choice(name: str, got: object, choices: Any) -> None:
    """Check that `got` is one of the values of the ``Literal`` type `choices`.

    Raises:
        PolicyError: it is not; the text lists the values.
    """
    expect(got in get_args(choices), name, _label(choices), got)


def parameters(cls: type) -> tuple[Parameter, ...]:
    """List the parameters of `cls`, in the order of its `__init__`."""
    return _parameters(cls)


@functools.lru_cache(maxsize=512)
def _parameters(cls: Any) -> tuple[Parameter, ...]:
    # `object.__init__` has a signature of ``*args, **kwargs`` that accepts nothing.
    if cls.__init__ is object.__init__:
        return ()

    constructor = _constructor(cls)
    # Annotations may name types that are imported for type checkers only; such a
    # parameter is read by the type of its default.
    try:
        hints = get_type_hints(constructor)
    except NameError:
        hints = {}

    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    _self, *arguments = inspect.signature(constructor).parameters.values()
    return tuple(
        Parameter(
            name=argument.name,
            accepts=hints.get(argument.name, _guess(argument.default)),
            default=argument.default,
        )
        for argument in arguments
        if argument.kind in by_name
    )


def _constructor(cls: Any) -> Any:
    """`__init__` as a Python function: of a compiled class, whose own has no signature,
    as its source beside it defines it.

    Raises:
        PolicyError: the source is missing.
    """
    if isinstance(cls.__init__, types.FunctionType):
        return cls.__init__
    owner = cls.__init__.__objclass__
    module = sys.modules[owner.__module__]
    source = source_file(module)
    try:
        tree = ast.parse(source.read_text("utf-8"))
    except OSError as error:
        raise PolicyError(f"{source}: expected the source of its extension") from error
    defined = _named(_named(tree, owner.__name__), "__init__")
    definition = ast.Module([defined], type_ignores=[])
    flags = annotations.compiler_flag
    names = dict(vars(module))
    exec(compile(definition, source, "exec", flags), names)  # noqa: S102 - our own file
    return names["__init__"]


def source_file(module: types.ModuleType) -> Path:
    """The Python file of a module, compiled or not."""
    file = Path(str(module.__file__))
    if file.suffix == ".py":
        return file
    return file.with_name(f"{file.name.partition('.')[0]}.py")


def _named(node: Any, name: str) -> Any:
    """The definition of a name among the statements of a module or class."""
    return next(each for each in node.body if getattr(each, "name", "") == name)


def split(text: str) -> dict[str, str]:
    """Split ``a=1,b=x`` into names and texts; hyphens in names are underscores.

    Raises:
        PolicyError: a part is not ``name=value``, or a name comes twice.
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise PolicyError(f"expected name=value, got {part.strip()!r}")

        # Python's name of the argument; users type either.
        name = name.replace("-", "_")
        if name in values:
            raise PolicyError(f"{name}: given twice")
        values[name] = value
    return values


def split_policies(text: str) -> list[str]:
    """Split ``greedy+lfu:decay=0.9,variant=perfect,all-cpu`` where a policy begins, not
    inside its parameters.

    Raises:
        PolicyError: no policy at all.
    """
    policies: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        # A parameter has an equals sign behind its name; no policy has.
        if policies and re.match(r"[\w-]+=", piece):
            policies[-1] += f",{piece}"
        else:
            policies.append(piece)
    if not policies:
        raise PolicyError(f"expected names separated by commas, got {text!r}")
    return policies


def typed(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `values` into arguments for `cls`: texts are parsed by annotation, other
    values checked.

    Raises:
        PolicyError: a parameter is unknown or missing, or a value does not fit.
    """
    # All names are checked before any value: a misspelt name is the likelier mistake.
    known = {parameter.name: parameter for parameter in parameters(cls)}
    for name in values:
        if name not in known:
            raise PolicyError(
                f"unknown parameter {name!r}; known: {', '.join(known) or 'none'}"
            )
    for parameter in known.values():
        if parameter.default is REQUIRED and parameter.name not in values:
            raise PolicyError(
                f"{parameter.name}: expected {parameter.type_label}, got nothing"
            )
    return {name: _convert(known[name], value) for name, value in values.items()}


def _convert(parameter: Parameter, value: Any) -> Any:
    """`value` as the first accepted type that it fits."""
    for option in _options(parameter.accepts):
        fits, result = _as(option, value)
        if fits:
            return result
    raise PolicyError(
        f"{parameter.name}: expected {parameter.type_label}, got {value!r}"
    )


def _as(option: Any, value: Any) -> tuple[bool, Any]:
    """Whether `value` is a value (or the text of a value) of type `option`, and that
    value.
    """
    # Truth values and `none` are read in any case; a Literal's values are exact.
    lowered = value.lower() if isinstance(value, str) else value
    if option is bool:
        truth = lowered
        if isinstance(lowered, str):
            truth = _TRUTH_VALUES.get(lowered, lowered)
        return isinstance(truth, bool), truth

    if option in (int, float):
        return _number(option, value)

    if option is type(None):
        return lowered is None or lowered == "none", None

    if get_origin(option) is Literal:
        return value in get_args(option), value

    fits = option is Any or (isinstance(option, type) and isinstance(value, option))
    return fits, value


def _number(option: type[int | float], value: Any) -> tuple[bool, Any]:
    """As `_as`, for numbers: integers pass as floats, floats not as integers, truth
    values as neither.
    """
    # `bool` is a subclass of `int`, so it must be turned away first.
    if isinstance(value, bool) or not isinstance(value, (str, int, option)):
        return False, value
    try:
        return True, option(value)
    except ValueError:
        return False, value


def _options(accepts: Any) -> list[Any]:
    """The members of a union, narrow ones first, so that ``int | str`` reads "4" as a
    number.
    """
    members = [accepts]
    if get_origin(accepts) in (Union, types.UnionType):
        members = list(get_args(accepts))
    narrow = [member for member in _TRY_ORDER if member in members]
    return narrow + [member for member in members if member not in narrow]


def _guess(default: Any) -> Any:
    """A type for a parameter without an annotation: that of its default."""
    if isinstance(default, (bool, int, float, str)):
        return type(default)
    return int | float | bool | str | None


def _label(accepts: Any) -> str:
    """The accepted values in words, the last two joined by "or"."""
    labels: list[str] = []
    for option in _options(accepts):
        if get_origin(option) is Literal:
            labels.extend(str(value) for value in get_args(option))
        elif option is type(None):
            labels.append("none")
        elif option is bool:
            labels.append("true or false")
        else:
            labels.append(getattr(option, "__name__", "any"))

    listed = ", ".join(labels[:-1])
    return f"{listed} or {labels[-1]}" if listed else labels[-1]

"""Options declared once, as fields of a frozen dataclass.

The command line, the keyword arguments of Python functions, configuration files, their
JSON schema and the checks of what fits together are all derived from the fields. So a
new option is a field here and a line where it is used::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class HitsOptions(Options):
        cache_ratios: tuple[float, ...] = option(
            (0.1, 0.5), "Sizes, as shares of all experts."
        )
        png: Path | None = option(None, "Draw them.", place="file", suffixes=PICTURES)
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.files import is_stdout
from moesim.base.text import one_expected
from moesim.base.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable


class ConfigError(ValueError):
    """An option that does not exist, or a value that does not fit it."""


PICTURES = (".png", ".svg", ".pdf")
PAGES = (".html", ".htm")
TABLES = (".csv", ".parquet")
TIMELINES = (".json", ".json.gz")
"""Endings of names, by what is written there."""


@dataclass(frozen=True, slots=True)
class Option:
    """The way people write the value of a field, and the values that fit.

    Attributes:
        help: one line that explains it.
        kind: what a text is read as: ``str``, ``int``, ``float``, ``bool`` or ``Path``;
            None takes the first of them that the field's type names.
        metavar: stands for the value in help texts; None takes its choices, or a word
            for its kind.
        minimum, maximum: bounds of a number, both included.
        choices: the only texts that fit; empty where any does.
        is_size: the number counts bytes, which people write as ``8GiB``; the field's
            name ends in ``_bytes``.
        policy_kind: the text names a policy of this kind, parameters included.
        many: the value is a tuple, as the field's type says; people write it with
            commas.
        argument: it stands on the command line without a flag.
        flag: its name there; None derives it from the field's.
        place: what a path is: an ``input``, a ``file`` or a ``folder`` that is written.
        suffixes: endings that the name of a written file may have; empty for any.
        holds: names of the files that a folder gets.
        needs: other fields, one of which must be given beside it.
        excludes: other fields that must not be given beside it.
        accepts_objects: Python may pass what the text stands for, already loaded.
        on_command_line: False for what only files and Python say.
    """

    help: str
    kind: Any = None
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    is_size: bool = False
    policy_kind: str | None = None
    many: bool = False
    argument: bool = False
    flag: str | None = None
    place: str | None = None
    suffixes: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    accepts_objects: bool = False
    on_command_line: bool = True


MOST_INTEGER = 2**63 - 1
"""What tables and C types hold."""

REQUIRED: Any = MISSING
"""The default of an option that must be given."""


def option(default: Any, text: str, **details: Any) -> Any:
    """Declare a field of an options dataclass; `details` as in `Option`."""
    return field(default=default, metadata={"option": Option(text, **details)})


def seed_option(text: str = "Of everything that is drawn.") -> Any:
    """``--seed``, which decides all that a command draws."""
    return option(0, text, minimum=0)


def jobs_option() -> Any:
    """``--jobs``, how many replays run at the same time."""
    text = "Replays at the same time. Default: as many as pay, one per core at most."
    return option(None, text, minimum=1)


def minutes_option(text: str, default: float | None = None) -> Any:
    """``--minutes``, a limit of time that is kept."""
    return option(default, text, metavar="M", minimum=0.0)


def policies_option(*names: str) -> Any:
    """Policies that compete."""
    text = "Systems, or assignment+cache+prefetch such as greedy+lru+none."
    return option(names, text, metavar="P", policy_kind="assignment")


def input_option(text: str, default: Any = None, **details: Any) -> Any:
    """A file that is read, or several, or a folder; no result replaces it."""
    details = {"metavar": "FILE", **details}
    return option(default, text, kind=Path, place="input", **details)


def trace_argument() -> Any:
    """The trace that a command reads."""
    text = "A moesim trace (Parquet), or the name of one that ships."
    return input_option(text, REQUIRED, metavar="TRACE", argument=True)


def target_argument(text: str, default: Any = REQUIRED, **details: Any) -> Any:
    """The one file that a command makes."""
    place = {"metavar": "DST", "argument": True, "place": "file"}
    return option(default, text, **place, **details)


def file_option(text: str, *suffixes: str, **details: Any) -> Any:
    """A file that is written where a user names one, with one of these endings."""
    details = {"metavar": "FILE", **details}
    place = {"place": "file", "suffixes": suffixes}
    return option(None, text, **place, **details)


def folder_option(text: str, *holds: str, default: Any = None) -> Any:
    """A folder that is written where a user names one, with files of these names."""
    return option(default, text, place="folder", metavar="DIR", holds=holds)


_METAVARS = {str: "NAME", int: "N", float: "X", bool: None, Path: "PATH"}
_KINDS: dict[str, type] = {kind.__name__: kind for kind in _METAVARS}


@cache
def option_of(declared: Field[Any]) -> Option:
    """Return the option of a field: as stated, or as its name and type say."""
    stated: Option = declared.metadata["option"]
    # Types are texts in modules whose annotations are postponed.
    type_text = str(declared.type)
    named = re.search(rf"\b({'|'.join(_KINDS)})\b", type_text)
    kind = stated.kind or (_KINDS[named[1]] if named else str)
    is_size = declared.name.endswith("_bytes")
    metavar = "SIZE" if is_size else _METAVARS[kind]
    return replace(
        stated,
        kind=kind,
        metavar=stated.metavar or "|".join(stated.choices) or metavar,
        is_size=is_size,
        many="tuple[" in type_text,
    )


def default_of(declared: Field[Any]) -> Any:
    """The default of a field; None where it must be given."""
    return None if declared.default is MISSING else declared.default


def flag_of(declared: Field[Any]) -> str:
    """``gpu_memory_bytes`` -> ``--gpu-memory``: people write the unit themselves."""
    stated = option_of(declared)
    if stated.argument:
        return stated.metavar or declared.name.upper()
    name = declared.name.removesuffix("_bytes").replace("_", "-")
    return stated.flag or f"--{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base of all dataclasses of options.

    Raises:
        ConfigError: a value that does not fit its field.
    """

    def __post_init__(self) -> None:
        """Refuse values of the wrong type or out of bounds, naming the field."""
        for declared in fields(self):
            value = getattr(self, declared.name)
            stated = option_of(declared)
            if value is None and declared.default is None:
                continue
            if stated.many and (is_list(value) or value is None):
                texts = () if value is None else value
                values = tuple(_fitting(declared.name, each, stated) for each in texts)
                object.__setattr__(self, declared.name, values)
                continue
            value = _fitting(declared.name, value, stated)
            object.__setattr__(self, declared.name, (value,) if stated.many else value)

    def options(self) -> dict[str, Any]:
        """All fields by name, as they are."""
        return {
            declared.name: getattr(self, declared.name) for declared in fields(self)
        }

    def arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Those fields that a function takes under the same name."""
        # Its signature may show options of a run as well, which come as a whole.
        code = function.__code__
        taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return {name: value for name, value in self.options().items() if name in taken}

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values; paths are absolute, so that a run can be repeated
        from any folder.
        """
        return {
            declared.name: _plain(getattr(self, declared.name), option_of(declared))
            for declared in fields(self)
        }

    def inputs(self) -> list[Path]:
        """Files that are read."""
        return self._places("input")

    def outputs(self) -> list[Path]:
        """Files that are written, those in folders included."""
        held = [
            Path(folder) / name
            for declared in fields(self)
            if (folder := getattr(self, declared.name)) is not None
            for name in option_of(declared).holds
        ]
        return [*self._places("file"), *held]

    def folders(self) -> list[Path]:
        """Folders that are written."""
        return self._places("folder")

    def _places(self, kind: str) -> list[Path]:
        values = [
            getattr(self, declared.name)
            for declared in fields(self)
            if option_of(declared).place == kind
        ]
        paths = [path for value in values for path in as_list(value)]
        # Python may pass what a path stands for, already loaded.
        return [Path(path) for path in paths if isinstance(path, str | Path)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonOptions(Options):
    """The answer as JSON."""

    as_json: bool = option(
        False, "Print one JSON object and nothing else.", flag="--json"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions(JsonOptions):
    """A picture and a page of what is printed."""

    png: Path | None = file_option("Draw it.", *PICTURES)
    html: Path | None = file_option("Write a page.", *PAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions(PageOptions):
    """A picture, a page and a table."""

    table: Path | None = file_option("Write the table.", *TABLES)


WRITTEN = ("out", "png", "html", "table", "perfetto", "as_json")
"""Fields that say where results go; help shows them last."""


def check_together(declared: Iterable[Field[Any]], given: Collection[str]) -> None:
    """Refuse options that contradict each other, or would be ignored.

    Args:
        declared: all fields of the options.
        given: names of those that a user stated.

    Raises:
        ConfigError: naming both options.
    """
    by_name = {field.name: field for field in declared}

    def called(field_name: str) -> str:
        return flag_of(by_name[field_name]) if field_name in by_name else field_name

    for field_name in by_name.keys() & given:
        stated = option_of(by_name[field_name])
        if stated.needs and not set(stated.needs) & set(given):
            needed = " or ".join(map(called, stated.needs))
            raise ConfigError(f"{called(field_name)}: expected {needed} beside it")
        for other in stated.excludes:
            if other in given:
                raise ConfigError(
                    f"{called(other)}: expected none beside {called(field_name)}"
                )


def is_list(value: Any) -> bool:
    """Tell whether a value is several values: a list, tuple, array or range."""
    is_sequence = hasattr(value, "__iter__") and hasattr(value, "__len__")
    # An array of no dimensions is one value.
    return is_sequence and not isinstance(value, str) and getattr(value, "ndim", 1) > 0


def as_list(value: Any) -> list[Any]:
    """Several values as a list; a single one as a list of one."""
    return list(value) if is_list(value) else [value]


_TYPES: dict[type, tuple[Any, str]] = {
    str: (str, "a text"),
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    Path: ((str, Path), "a path"),
}
"""Python types of each kind of option, and their name in errors. Numbers of numpy
are numbers too."""


def _fitting(name: str, value: Any, stated: Option) -> Any:
    """The value as Python's own kind.

    Raises:
        ConfigError: it does not fit.
    """
    if stated.is_size and isinstance(value, str):
        value = _bytes_of(name, value)
    _check(name, value, stated)
    # Numbers of numpy become Python's, which JSON and caches of compiled loops take.
    return stated.kind(value) if isinstance(value, Real) else value


def _bytes_of(name: str, text: str) -> int:
    try:
        return parse_bytes(text, where=name)
    except ValueError as error:
        raise ConfigError(f"{error}{one_expected(text, 'size')}") from None


def _check(name: str, value: Any, stated: Option) -> None:
    if is_list(value):
        raise ConfigError(
            f"{name}: expected one value, got {value!r}; moesim.sweep takes several"
        )
    accepted, expected = _TYPES[stated.kind]
    # Python counts truth values among the integers; `batch=True` is a slip.
    is_flag = isinstance(value, bool) and stated.kind is not bool
    fits = isinstance(value, accepted) and not is_flag

    # Choices say more than the kind of a text.
    if stated.choices:
        expected = " or ".join(stated.choices)
        fits = fits and value in stated.choices
    if stated.suffixes and fits and not _ends(value, stated.suffixes):
        expected = f"a name that ends in {' or '.join(stated.suffixes)}"
        fits = False
    if stated.minimum is not None:
        low = stated.minimum
        high = stated.maximum
        expected += f" >= {low}" if high is None else f" between {low} and {high}"
        # NaN fails both comparisons, as it should.
        fits = fits and value >= low and (high is None or value <= high)
    if fits and accepted is Integral and not -MOST_INTEGER <= value <= MOST_INTEGER:
        expected = "a number of 64 bits"
        fits = False
    # Whether an object is the right one shows where it is used.
    is_object = stated.accepts_objects and not isinstance(value, Real)
    if not fits and not is_object:
        shown = str(value) if isinstance(value, Path) else value
        raise ConfigError(f"{name}: expected {expected}, got {shown!r}")


def _ends(path: str | Path, suffixes: tuple[str, ...]) -> bool:
    """Tell whether a name has one of the endings. Standard output takes text."""
    if is_stdout(Path(path)):
        return not {".csv", ".json"}.isdisjoint(suffixes)
    return str(path).lower().endswith(suffixes)


def _plain(value: Any, stated: Option) -> Any:
    if value is None:
        return None
    if is_list(value):
        return [_plain(each, stated) for each in value]
    # A relative path would mean another file elsewhere.
    if stated.kind is Path:
        return str(Path(value).absolute())
    return stated.kind(value)

"""One door in: files of users and of other programs are read within limits.

Only regular files are read, never pipes, devices or folders: those would wait, or never
end. A text that is parsed as a whole may have `most_bytes`; what it may hold is up to
the standard library's parsers. `docs/reference/limits.md` states the limits.

What we wrote ourselves is read back by typed schemas: JSON in, an object of stated
types out, or one line that names the place. pydantic checks; its import takes a tenth
of a second, which only what reads such a file pays.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

from moesim.base.text import visible
from moesim.base.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pydantic import TypeAdapter

MOST_SEQUENCE_BYTES: Final = 512 << 20
"""Rows of one sequence, which are sorted in memory, without their scores."""

MOST_ARRAY_BYTES: Final = 1 << 30
"""Of an array or a table that is read as a whole, unpacked."""

MOST_LINE_BYTES: Final = 16 << 20
"""Of a line of JSON lines."""

MOST_COLUMNS: Final = 10_000
"""Columns of a table."""

MOST_BYTES_VARIABLE: Final = "MOESIM_MOST_INPUT"
"""Environment variable with another limit of bytes, such as ``2GiB``."""

_MOST_BYTES: Final = 64 << 20
_QUOTED_LETTERS: Final = 60


class InputError(ValueError):
    """A text is beyond what is read; one line that says by what."""


def most_bytes() -> int:
    """Return the largest file, or array, that is held as a whole."""
    stated = os.environ.get(MOST_BYTES_VARIABLE)
    if not stated:
        return _MOST_BYTES
    return parse_bytes(stated, where=MOST_BYTES_VARIABLE)


def open_input(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file to be read, with a buffer as `open` has it.

    Raises:
        OSError: no such file, or a folder, a pipe or a device.
    """
    check_file_name(path)
    # A pipe would be waited for until somebody writes.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
    try:
        _check_mode(path, os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb", buffering)


def check_input(path: Path) -> None:
    """Check what a library is about to open by its name.

    Raises:
        OSError: as `open_input`.
    """
    check_file_name(path)
    _check_mode(path, path.stat().st_mode)


def check_file_name(path: Path) -> None:
    """Refuse a name that no system takes.

    Raises:
        OSError: naming it.
    """
    if "\0" in str(path):
        reason = "expected a name without null characters"
        raise OSError(errno.EINVAL, reason, str(path))


def read_bytes(path: Path) -> bytes:
    """Read a whole file.

    Raises:
        OSError: as `open_input`, or the file is larger than `most_bytes`.
    """
    most = most_bytes()
    with open_input(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        reason = (
            f"expected at most {format_bytes(most)}, found more; a larger file is read"
            f" with {MOST_BYTES_VARIABLE} set, such as to 2GiB"
        )
        raise OSError(errno.EFBIG, reason, str(path))
    return content


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Read a whole text.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: it is none in this encoding.
    """
    return read_bytes(path).decode(encoding)


def load_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        InputError: it is nested too deep.
        ValueError: it is no JSON, or no UTF-8.
    """
    # As text: of bytes Python guesses the encoding.
    return _parsed(
        json.loads, text.decode("utf-8") if isinstance(text, bytes) else text
    )


def load_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        InputError: it is nested too deep.
        ValueError: it is no TOML.
    """
    content: dict[str, Any] = _parsed(tomllib.loads, text)
    return content


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise InputError(
            "expected lists and objects in each other as deep as Python reads, found"
            " more"
        ) from None


def quoted(value: object, letters: int = _QUOTED_LETTERS) -> str:
    """Return the beginning of a value for an error's line, its controls visible."""
    text = visible(str(value)[: letters + 1])
    return text if len(text) <= letters else f"{text[:letters]}..."


def _check_mode(path: Path, mode: int) -> None:
    """Refuse a node that is no regular file."""
    if stat.S_ISDIR(mode):
        reason = "expected a file, found a folder"
        raise IsADirectoryError(errno.EISDIR, reason, str(path))
    if not stat.S_ISREG(mode):
        reason = "expected a file, found a pipe or a device"
        raise OSError(errno.EINVAL, reason, str(path))


Checked = TypeVar("Checked")

_FOUND_LETTERS = 40


def read_json(
    path: Path,
    schema: type[Checked],
    *,
    error: type[Exception],
    expected: str,
    way_out: str,
) -> Checked:
    """Read a JSON file into an object of a schema.

    Args:
        path: of the file.
        schema: a dataclass or a model of pydantic, or another type of known parts.
        error: class of what is raised.
        expected: what the file should be, such as ``the journal of a recording``.
        way_out: ends the message.

    Raises:
        Exception: of class `error`, one line: it cannot be read, is not JSON, or is
            something else.
    """
    try:
        content = read_bytes(path)
    except OSError as reason:
        raise error(
            f"{path}: expected {expected}, found: {reason.strerror or reason};"
            f" {way_out}"
        ) from None
    return parse_json(content, schema, where=str(path), error=error, way_out=way_out)


def parse_json(
    content: bytes | str,
    schema: type[Checked],
    *,
    where: str,
    error: type[Exception],
    way_out: str,
) -> Checked:
    """Parse JSON text into an object of a schema; numbers are not converted.

    Args:
        content: the text.
        schema: as for `read_json`.
        where: begins the message.
        error: class of what is raised.
        way_out: ends the message.

    Raises:
        Exception: of class `error`, one line.
    """
    from pydantic import ValidationError  # noqa: PLC0415 - as said above

    try:
        untyped: Any = schema
        adapter: TypeAdapter[Checked] = _adapter(untyped)
        return adapter.validate_json(content, strict=True)
    except ValidationError as failure:
        raise error(f"{where}: {_first(failure)}; {way_out}") from None


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - as said above

    return TypeAdapter(schema)


def _first(failure: Any) -> str:
    """The first of what does not fit: its place, what was expected, what was found."""
    fault = failure.errors(include_url=False)[0]
    place = ".".join(str(part) for part in fault["loc"])
    reason = fault["msg"].removeprefix("Value error, ")
    expected = reason.replace("Input should be", "expected", 1)
    prefix = f"{place}: " if place else ""
    if fault["type"] == "missing":
        return f"{prefix}expected a value, found none"
    if fault["type"] in ("json_invalid", "value_error"):
        return " ".join(f"{prefix}{expected}".split())

    value = repr(fault["input"])[:_FOUND_LETTERS]
    return " ".join(f"{prefix}{expected}, found {value}".split())

"""Typed schemas of what we read back: JSON in, an object of stated types out, or one
line that names the place.

pydantic checks; its import takes a tenth of a second, which only what reads such a file
pays.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from moesim.base.inputs import read_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import TypeAdapter

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

"""Bytes as people write them: ``8GiB``, ``7.4GB``, ``512MiB``, ``4096``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    # A bare letter means what memory is sold by.
    _UNITS[_letter] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power

_FEWEST_BYTES = 1024
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(
    text: str | int,
    *,
    where: str = "size",
) -> int:
    """Turn a size into bytes. ``MiB`` and ``M`` are 1024 × 1024, ``MB`` is 1,000,000;
    upper and lower case are the same.

    Args:
        text: a number with a unit, or plain bytes.
        where: what the size is for, named in errors.

    Raises:
        ValueError: not a size, an unknown or ambiguous unit, a negative or broken
            number of bytes.
    """
    # A boolean is an integer to Python, but no size to anybody.
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text

    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f"{where}: expected a size such as 8GiB, 7.4GB or 512MiB, got {text!r}"
        )

    number, unit = match.groups()
    if unit.lower() not in _UNITS:
        raise ValueError(
            f"{where}: unknown unit {unit!r} in {text!r}; write K, M, G, T or KiB, MiB,"
            " GiB, TiB"
            " (powers of 1024) or KB, MB, GB, TB (powers of 1000)"
        )
    if unit.lower() in {"", "b"} and "." in number:
        raise ValueError(
            f"{where}: expected whole bytes, got {text!r}; add a unit such as GiB"
        )

    # Nobody means so few bytes; somebody means so many gigabytes.
    if not unit and 0 < int(number) < _FEWEST_BYTES:
        raise ValueError(
            f"{where}: {text} means {number} bytes; write {number}GiB, or {number}B for"
            " bytes"
        )

    # In integers: a float would lose bytes of large sizes.
    integer, _, fraction = number.partition(".")
    scaled = int(integer + fraction) * _UNITS[unit.lower()]
    return round(scaled / 10 ** len(fraction)) if fraction else scaled


def format_bytes(
    count: float,
    decimals: int = 1,
) -> str:
    """Write bytes in the largest binary unit that keeps the number at 1 or above: ``7.4
    GiB``.
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.{decimals}f} {unit}"
        value /= 1024

    return f"{value:.{decimals}f} TiB"


def format_sizes(sizes: Sequence[float]) -> str:
    """Write different sizes, ascending: ``2.0 MiB or 7.4 MiB``; of many, the first and
    the last.
    """
    if len(sizes) <= 4:
        return " or ".join(map(format_bytes, sizes))
    first = format_bytes(sizes[0])
    last = format_bytes(sizes[-1])
    return f"{first} to {last}, {len(sizes)} sizes"

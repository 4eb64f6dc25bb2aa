"""Numbers with units, as people read them.

Inside moesim everything is seconds and bytes. Milliseconds, GB/s, per cent and GiB
appear here and nowhere else.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_VALUE = "-"
"""Printed where a figure has no meaning, such as a rate without any event."""


def is_missing(value: float | None) -> bool:
    """Tell whether a figure has no meaning; pandas turns None into NaN."""
    return value is None or math.isnan(value)


def ms(seconds: float | None) -> str:
    """Milliseconds; seconds from one second on."""
    if is_missing(seconds):
        return NO_VALUE
    assert seconds is not None
    return number(seconds, " s") if seconds >= 1 else number(seconds * 1e3, " ms")


def percent(share: float | None, decimals: int = 1) -> str:
    """A share as per cent."""
    if is_missing(share):
        return NO_VALUE
    assert share is not None
    return f"{100 * share:.{decimals}f} %"


def bandwidth(bytes_per_s: float | None) -> str:
    """Bytes per second in powers of 1000, as vendors state bandwidths."""
    if is_missing(bytes_per_s):
        return NO_VALUE
    assert bytes_per_s is not None
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits below a thousand, whole numbers above."""
    if is_missing(value):
        return NO_VALUE
    assert value is not None
    if value == 0:
        return f"0{unit}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))

    # Beyond six decimals a figure is noise, and its column gets wide.
    return f"{value:,.{min(decimals, 6)}f}{unit}"


# -- bytes as people write them --------------------------------------------------------


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

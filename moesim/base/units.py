"""Numbers with units, as people read them.

Inside moesim everything is seconds and bytes. Milliseconds, GB/s and per cent appear
here and nowhere else; `moesim.base.sizes` does the same for GiB.
"""

from __future__ import annotations

import math

NO_VALUE = "-"
"""Printed where a figure has no meaning, such as a rate without any event."""


def is_missing(value: float | None) -> bool:
    """Whether a figure has no meaning; pandas turns None into NaN."""
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

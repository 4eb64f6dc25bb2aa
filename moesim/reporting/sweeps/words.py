"""How reports call the axes of a sweep and their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesim.traces.sizes import format_bytes

HEADS = {
    "trace": "trace",
    "hw": "machine",
    "cache_ratio": "GPU cache",
    "slots_per_layer": "per layer",
    "gpu_memory_bytes": "GPU memory",
    "host_memory_bytes": "host memory",
}
"""Heads of columns; other options are called by their names."""


def axis_head(name: str) -> str:
    """What a report calls an axis."""
    return HEADS.get(name, name.removesuffix("_bytes").replace("_", " "))


def axis_value(name: str, value: Any) -> str:
    """What a report calls a value of an axis: ``8.0 GiB``, ``12.5 %``, ``default``."""
    if value is None or value != value:  # noqa: PLR0124 - NaN is not itself
        return "default"
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    if name == "cache_ratio":
        return f"{100 * value:.6g} %"
    if name == "trace":
        return Path(str(value)).stem
    # Pandas turns whole numbers beside gaps into floats.
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)

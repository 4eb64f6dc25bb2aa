"""What a calibrated profile keeps of the one that its calibration started from:
operations that no run showed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from moesim.hwprofiles.schema import IN_PLACE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.hwprofiles.schema import Quantity

_PLANNING = re.compile(r"(costs\.planning)\.([^.]+)\.(base_s|per_expert_s)")


def profile_entries(
    found: Mapping[str, Quantity], base: Mapping[str, Quantity]
) -> dict[str, Quantity]:
    """Numbers of a profile with the calibrated ones put in.

    What the runs did not show of what they take beyond operations in isolation is
    dropped: the figure of another calibration does not fit this one, and an isolated
    one would be counted twice. Policies that were not run plan as all that were run do
    together, and what theirs took in isolation beyond the default's.

    Args:
        found: what the runs showed, by dotted path.
        base: numbers of the profile that the calibration started from.
    """
    kept = {
        path: one
        for path, one in base.items()
        if not any(fnmatchcase(path, pattern) for pattern in IN_PLACE)
    }
    put = {**kept, **found}
    for path in kept.keys() - found.keys():
        named = _PLANNING.fullmatch(path)
        if named is None:
            continue
        table, name, key = named.groups()
        default = found.get(f"{table}.default.{key}")
        alone = base.get(f"{table}.default.{key}")
        if default is None or alone is None:
            continue
        put[path] = _beyond(default, base[path].value - alone.value, name)
        per_copy = found.get(f"{table}.default.per_copy_s")
        if per_copy is not None:
            put[f"{table}.{name}.per_copy_s"] = per_copy
    return put


def _beyond(default: Quantity, more_s: float, name: str) -> Quantity:
    """The default in place, and `more_s` beyond it; the scatter of what was not run is
    not known.
    """
    value, *interval = (
        max(0.0, one + more_s) for one in (default.value, *(default.interval or ()))
    )
    words = (
        f"all policies together in designed runs, and what {name} took in isolation"
        " beyond the default"
    )
    return replace(
        default,
        value=value,
        source=words,
        interval=(interval[0], interval[1]) if interval else None,
        quantiles=(),
    )

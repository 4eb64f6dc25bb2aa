"""Keeps costs of operations that no designed run showed: those of the profile that the
calibration started from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moesim.hwprofiles import paths
from moesim.hwprofiles.schema import is_in_place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.hwprofiles.schema import Quantity

_KEYS = ("base_s", "per_expert_s")
"""Of the constants of planning, those that are measured in isolation, too."""


def profile_entries(
    calibrated: Mapping[str, Quantity], base: Mapping[str, Quantity]
) -> dict[str, Quantity]:
    """Return the numbers of a profile with the calibrated ones put in.

    What the runs did not show of what they take beyond operations in isolation is
    dropped: the figure of another calibration does not fit this one, and an isolated
    one would be counted twice. Policies that were not run plan as all that were run do
    together, and what theirs took in isolation beyond the default's.

    Args:
        calibrated: what the runs showed, by dotted path.
        base: numbers of the profile that the calibration started from.
    """
    kept = {path: quantity for path, quantity in base.items() if not is_in_place(path)}
    entries = {**kept, **calibrated}
    default = paths.planning(paths.DEFAULT_POLICY)

    for path in kept:
        policy = _planning_policy(path)
        key = path.rpartition(".")[2]
        if policy is None or path in calibrated or key not in _KEYS:
            continue
        default_path = getattr(default, key)
        in_place = calibrated.get(default_path)
        in_isolation = base.get(default_path)
        if in_place is None or in_isolation is None:
            continue
        # A solver is as much slower in a run as it is alone; what a run adds to any
        # decision is the same.
        beyond_s = base[path].value - in_isolation.value
        entries[path] = _beyond(in_place, beyond_s, policy)

        per_copy = calibrated.get(default.per_copy_s)
        if per_copy is not None:
            entries[paths.planning(policy).per_copy_s] = per_copy
    return entries


def _planning_policy(path: str) -> str | None:
    """Return the policy that a path of planning constants belongs to; None for any
    other path.
    """
    table = path.rpartition(".")[0]
    policy = table.rpartition(".")[2]
    return policy if path in paths.planning(policy) else None


def _beyond(default: Quantity, beyond_s: float, policy: str) -> Quantity:
    """Return the default in place, and `beyond_s` on top of it."""
    interval = None
    if default.interval is not None:
        interval = (
            max(0.0, default.interval[0] + beyond_s),
            max(0.0, default.interval[1] + beyond_s),
        )
    return replace(
        default,
        value=max(0.0, default.value + beyond_s),
        source=(
            f"all policies together in designed runs, and what {policy} took in"
            " isolation beyond the default"
        ),
        interval=interval,
        # How single plannings of a policy scatter that was not run is not known.
        quantiles=(),
    )

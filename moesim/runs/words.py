"""Checks a configuration by names alone: before anything is imported that takes longer
to load than a typing error is worth.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moesim.hwprofiles.profile import load_profile
from moesim.policies.registry import check_name
from moesim.policies.systems import PARTS, compose
from moesim.traces.shipped import find_trace

if TYPE_CHECKING:
    from moesim.runs.config import RunConfig


def check_words(config: RunConfig) -> None:
    """Check the names of policies, machine and trace.

    Raises:
        PolicyError: there is no such system or policy.
        ProfileError: no such machine, or a damaged profile.
        TraceError: no such trace, or no such shape.
    """
    parts = {part: getattr(config, part) for part in (*PARTS, "routing")}
    system = compose(config.policy, **parts)
    for kind in ("assignment", *parts):
        check_name(getattr(system, kind), kind)
    if isinstance(config.hw, str | Path):
        # Read once in a process.
        load_profile(config.hw)
    if isinstance(config.trace, str | Path):
        find_trace(config.trace)
    shape = getattr(config, "shape", None)
    if shape is not None:
        # Only measured runs have one.
        from moesim.traces.models import model_shape  # noqa: PLC0415 - reads a table

        model_shape(shape)

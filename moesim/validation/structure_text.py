"""Structures of runs, measured and simulated, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.reporting.tables import aligned
from moesim.validation.structure import MEDIAN_AIM, WORST_AIM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.validation.structure import Structure

_LINES = 10
"""Most findings that are printed of one run."""
_SMALL = 0.01
"""Shares of the workers' time below this are summed up."""
HEADS = ("run", "steps", "median", "worst", "states", "lanes", "orders", "verdict")


def structure_text(results: Sequence[Structure]) -> str:
    """One row per run, what differs by kind, and where the workers' time went."""
    rows = [HEADS, *(_row(result) for result in results)]
    lines = aligned(rows)
    for result in results:
        findings = result.findings()
        lines += [f"{result.run}: {finding}" for finding in findings[:_LINES]]
        if len(findings) > _LINES:
            lines.append(f"{result.run}: and {len(findings) - _LINES} more")
    lines += ["", *(_shares_line(result) for result in results)]
    equal = sum(result.is_equal for result in results)
    lines.append(
        f"{equal} of {len(results)} runs have the simulator's structure (steps within"
        f" {MEDIAN_AIM:.1%} in the median and {WORST_AIM:.0%} at worst, all access"
        " states, lanes and orders equal)"
    )
    return "\n".join(lines)


def _row(result: Structure) -> tuple[str, ...]:
    states = sum(result.other_states.values())
    return (
        result.run,
        str(len(result.step_errors)),
        f"{result.median:.2%}",
        f"{result.worst:.2%}",
        f"{result.accesses - states:,}/{result.accesses:,}",
        "equal" if not result.other_lanes else str(result.other_lanes),
        "equal" if not result.orders else ", ".join(result.orders),
        "equal" if result.is_equal else "DIFFERENT",
    )


def _shares_line(result: Structure) -> str:
    """Name the parts of the workers' time, the largest first."""
    ranked = sorted(result.shares.items(), key=lambda item: -item[1])
    parts = [f"{name} {share:.0%}" for name, share in ranked if share >= _SMALL]
    return f"{result.run}: workers' time: {', '.join(parts)}"

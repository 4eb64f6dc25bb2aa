"""What a check found: a verdict, and the way out where there is one to look for."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Verdict = Literal["ok", "limited", "fails"]
"""``limited``: all works, with a consequence that is stated."""


class Finding(NamedTuple):
    """The outcome of one check.

    Attributes:
        verdict: whether it holds.
        outcome: what was found, in a line.
        way_out: what helps, where it does not hold.
        figures: numbers behind the line.
    """

    verdict: Verdict
    outcome: str
    way_out: str = ""
    figures: dict[str, Any] | None = None


def holds(outcome: str, **figures: Any) -> Finding:
    """All is well."""
    return Finding("ok", outcome, figures=figures)


def limited(outcome: str, way_out: str, **figures: Any) -> Finding:
    """It works, and something is lost."""
    return Finding("limited", outcome, way_out, figures)


def fails(outcome: str, way_out: str, **figures: Any) -> Finding:
    """It does not work."""
    return Finding("fails", outcome, way_out, figures)

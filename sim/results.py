"""What a replay answers, whichever engine ran it."""

from __future__ import annotations

from dataclasses import dataclass


class SimulationError(RuntimeError):
    """The simulation itself has failed: our bug, not the user's."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay did. `events` counts scheduled SimPy events; `makespan_s` is
    virtual.
    """

    steps: int
    layer_steps: int
    events: int
    makespan_s: float

"""Grades assignments: how far each layer step's plan is from the best possible one."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moesim.policies.assignment._optimum import (
    modelled_s,
    optimal,
    optimal_scheduled,
    scheduled_s,
)

PROVEN = 1e-9
"""Relative difference below which two makespans are equal: solver and simulator add in
different orders.
"""


@dataclass(slots=True)
class Grades:
    """How far each layer step's assignment is from the best lanes for the same state of
    the machine.

    Attributes:
        modelled: chosen makespan over the least, with lanes as sums of costs (what most
            policies minimise).
        scheduled: the same with copies that follow each other on their link.
        chosen_s: modelled makespan, summed over layer steps.
        least_s: the least modelled makespan, likewise.
        unproven: layer steps for which the solver ran out of memory; their ratio may be
            too small.
    """

    modelled: array[float] = field(default_factory=lambda: array("d"))
    scheduled: array[float] = field(default_factory=lambda: array("d"))
    chosen_s: float = 0.0
    least_s: float = 0.0
    unproven: int = 0

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Grade one answer; layer steps that cost nothing are left out.

        An observer of `AssignmentPolicy.assign` (`moesim.policies.planner.observers`).
        """
        del call
        work, view = arguments
        modelled = optimal(work)
        scheduled = optimal_scheduled(work, view)
        if not modelled.makespan_s or not scheduled.makespan_s:
            return

        # Both ratios compare like with like: each model prices both plans.
        chosen_s = modelled_s(work, answer.lanes)
        chosen_scheduled_s = scheduled_s(work, view, answer.lanes, answer.order)
        self.modelled.append(chosen_s / modelled.makespan_s)
        self.scheduled.append(chosen_scheduled_s / scheduled.makespan_s)
        self.chosen_s += chosen_s
        self.least_s += modelled.makespan_s

        # A solver that stopped early knows a bound below its best answer.
        self.unproven += any(
            best.bound_s < best.makespan_s * (1.0 - PROVEN)
            for best in (modelled, scheduled)
        )

    def to_json(self) -> dict[str, Any]:
        """Return mean, 95th percentile, maximum and share of optimal answers of both
        ratios; null without layer steps.
        """
        # Weighted by seconds: a bad plan of a short layer step costs little.
        total_ratio = self.chosen_s / self.least_s if self.least_s else None
        return {
            "layer_steps": len(self.modelled),
            "unproven": self.unproven,
            "modelled": _statistics(np.array(self.modelled)),
            "scheduled": _statistics(np.array(self.scheduled)),
            "total_ratio": total_ratio,
        }


def _statistics(ratios: np.ndarray) -> dict[str, float | None]:
    if not len(ratios):
        return dict.fromkeys(("mean", "p95", "max", "optimal_share"))
    return {
        "mean": float(ratios.mean()),
        "p95": float(np.percentile(ratios, 95)),
        "max": float(ratios.max()),
        "optimal_share": float(np.mean(ratios <= 1.0 + PROVEN)),
    }

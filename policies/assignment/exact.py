"""The exact optimum of every layer step, as a policy."""

from __future__ import annotations

from typing import Literal

from moesim.policies.assignment._optimum import optimal, optimal_scheduled
from moesim.policies.base import Assignment, AssignmentPolicy, LayerWork, MachineView
from moesim.policies.parameters import expect_choice

Objective = Literal["modelled", "scheduled"]


class Exact(AssignmentPolicy):
    """Minimise the makespan of the layer step exactly, by dynamic programming.

    Optima are often not unique; which one comes back is fixed by the search, and only
    the makespan is comparable.

    Args:
        objective: ``modelled`` is what `ilp`, `greedy` and `beam` minimise: a lane's
            time is the sum of its experts' costs, each the longer of waiting and
            computing. ``scheduled`` follows the operations: copies follow each other on
            the link, a GPU computes residents first and arrivals as they land.

    Source: DALI, equations 3-9, for the first; the second is ours. Method:
    `policies/assignment/_dynamic_program.py`.
    """

    def __init__(self, *, objective: Objective = "modelled") -> None:
        expect_choice("objective", objective, Objective)
        self.objective = objective

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Place optimally; what matters most is launched first (modelled), or in the
        schedule's order.
        """
        if self.objective == "modelled":
            best = optimal(work)
        else:
            best = optimal_scheduled(work, view)
        return Assignment(best.lanes, best.order)

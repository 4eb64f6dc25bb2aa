"""The exact optimum of every layer step, as a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moesim.policies.assignment._contended import PlannedInTime
from moesim.policies.assignment._optimum import OptimumSearch
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

Objective = Literal["modelled", "scheduled", "contended"]


class Exact(PlannedInTime):
    """Minimise the makespan of the layer step exactly, by dynamic programming.

    Optima are often not unique; which one comes back is fixed by the search, and only
    the makespan is comparable.

    Args:
        objective: ``modelled`` is what `ilp`, `greedy` and `beam` minimise: a lane's
            time is the sum of its experts' costs, each the longer of waiting and
            computing. ``scheduled`` follows the operations: copies follow each other on
            the link, a GPU computes residents first and arrivals as they land.
            ``contended`` is the best of three such optima where CPU and links slow each
            other: as they are alone, beside each other, and without copies.

    Source: DALI, equations 3-9, for the first; the others are ours. Method:
    `policies/assignment/_dynamic_program.py`.
    """

    def __init__(self, *, objective: Objective = "modelled") -> None:
        expect_choice("objective", objective, Objective)
        self.objective = objective
        self.sees_contention = objective == "contended"

    def start(self, context: RunContext) -> None:
        """Make room."""
        PlannedInTime.start(self, context)
        experts = context.shape.experts
        # Layers of a GPU of their own are searched without the others.
        self.one = OptimumSearch(1, experts)
        self.several = OptimumSearch(context.gpus, experts)

    def plan(self, work: Work, lanes: Ints, order: Ints) -> None:
        search = self.one if work.gpus == 1 else self.several
        if self.objective == "modelled":
            search.modelled(work)
        else:
            search.scheduled(work)
        for i in range(work.active):
            lanes[i] = search.lanes[i]
            order[i] = search.order[i]

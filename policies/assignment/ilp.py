"""The assignment problem as an integer program, solved by a library: a reference for
the other policies, too slow for use.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
import pulp

from moesim.policies.assignment._gpu_choice import link_s, transfer_s
from moesim.policies.assignment._kernels import gap_order
from moesim.policies.base import (
    Assignment,
    AssignmentPolicy,
    LayerWork,
    MachineView,
    PolicyError,
)
from moesim.policies.parameters import expect, expect_choice

Solver = Literal["auto", "highs", "cbc"]


class ILP(AssignmentPolicy):
    """Minimise the time of the slowest lane exactly, by integer programming.

    ``min z`` subject to ``z >= load`` of the CPU and of each GPU, one lane per active
    expert. The printed equations 7 and 8 fix only how many variables are set; equality
    per active expert is the reading that makes sense. Costs and launch order are
    greedy's; a GPU that is given absent experts waits once for the copy under way on
    its link. Optima are often not unique: which one comes back is the solver's choice,
    the same for the same solver version (one thread, no time limit, zero gap), and only
    the objective is comparable. Times are scaled by their largest before solving,
    because solvers' tolerances are absolute.

    Args:
        solver: ``highs`` in process, ``cbc`` as a program that PuLP brings, ``auto``
            the first of the two that works.
        staging: at most so many experts that are not resident may go to each GPU
            (equation 9, counting copies only); ``none`` for no limit.

    Source: DALI, equations 3-9.
    """

    def __init__(self, *, solver: Solver = "auto", staging: int | None = None) -> None:
        expect_choice("solver", solver, Solver)
        holds = staging is None or staging >= 0
        expect(holds, "staging", "a number >= 0 or none", staging)
        self.staging = staging
        self._solver = _solver(solver)

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Build the program, solve it, read the lanes back."""
        del view
        costs = np.vstack(
            [
                np.maximum(work.host_s, work.cpu_s),
                np.maximum(transfer_s(work), work.gpu_s),
            ]
        )
        # [1 + G, A]; a layer step in which everything is free needs no scale.
        scale_s = max(costs.max(), link_s(work).max()) or 1.0
        costs = costs / scale_s
        wait = link_s(work) / scale_s
        lanes, active = costs.shape

        problem = pulp.LpProblem("assignment", pulp.LpMinimize)
        makespan = problem.add_variable("z", lowBound=0.0)
        on_lane = [
            [
                problem.add_variable(f"x_{lane}_{i}", cat=pulp.LpBinary)
                for i in range(active)
            ]
            for lane in range(lanes)
        ]
        # The order of variables and rows decides which of several optima comes back.
        problem += makespan
        for lane in range(lanes):
            terms = list(zip(on_lane[lane], costs[lane].tolist(), strict=True))
            if lane and wait[lane - 1]:
                # An absent expert waits for the copy under way; the next ones, no more.
                waits = problem.add_variable(f"w_{lane}", lowBound=0.0)
                terms.append((waits, float(wait[lane - 1])))
                behind = work.arrive_s[lane - 1] > link_s(work)[lane - 1]
                for absent_expert in np.flatnonzero(behind).tolist():
                    problem += waits >= on_lane[lane][absent_expert]
            problem += makespan >= pulp.LpAffineExpression(terms)
        for i in range(active):
            problem += pulp.lpSum(row[i] for row in on_lane) == 1
        if self.staging is not None:
            for g in range(lanes - 1):
                absent = np.flatnonzero(work.arrive_s[g] > 0.0)
                fetched = pulp.lpSum(on_lane[1 + g][i] for i in absent)
                problem += fetched <= self.staging

        problem.solve(self._solver)
        if problem.status != pulp.LpStatusOptimal:
            raise PolicyError(
                f"ilp: solver answered {pulp.LpStatus[problem.status]!r}; try"
                " solver=cbc or solver=highs"
            )
        # Solvers answer 0.999… and 1e-9, so the largest share is the lane.
        share = np.array([[variable.value() for variable in row] for row in on_lane])
        order = gap_order(work.cpu_s, work.host_s, work.gpu_s, work.arrive_s)
        return Assignment(share.argmax(axis=0).astype(np.int8), order)


# Every instance asks, but the answer does not change within a process.
@cache
def _solver(name: Solver) -> Any:
    """The first usable solver that `name` allows, silent and exact.

    Raises:
        PolicyError: it cannot run here.
    """
    makers = {
        "highs": lambda: pulp.HiGHS(msg=False, gapRel=0.0, threads=1, mip_abs_gap=0.0),
        "cbc": lambda: pulp.PULP_CBC_CMD(msg=False, gapRel=0.0, gapAbs=0.0, threads=1),
    }
    for candidate in makers if name == "auto" else (name,):
        solver = makers[candidate]()
        if solver.available():
            return solver
    raise PolicyError(
        f"solver: {name} cannot run here; install highspy, or PuLP with its CBC program"
    )

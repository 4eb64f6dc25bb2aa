"""The assignment problem as an integer program, solved by a library: a reference for
the other policies, too slow for use.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from moesim.base.units import percent
from moesim.policies.arrays import zeros
from moesim.policies.assignment._optimum import modelled_costs, modelled_s, optimal
from moesim.policies.assignment._placing import by_gap
from moesim.policies.assignment.greedy import Greedy
from moesim.policies.base import AssignmentPolicy, PolicyError
from moesim.policies.names import CPU
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

Solver = Literal["auto", "highs", "cbc"]

# Of a solver's answer: an expert with less than this on every lane has none.
_MOSTLY = 0.9


class ILP(AssignmentPolicy):
    """Minimise the time of the slowest lane exactly, by integer programming.

    ``min z`` subject to ``z >= load`` of the CPU and of each GPU, one lane per active
    expert. The printed equations 7 and 8 fix only how many variables are set; equality
    per active expert is the reading that makes sense. Costs and launch order are
    greedy's; a GPU that is given absent experts waits once for the copy under way on
    its link. A lane on which an expert would take forever is no choice for it; one that
    no lane could finish goes to the CPU and counts nothing. Optima are often not
    unique: which one comes back is the solver's choice, the same for the same solver
    version (one thread, zero gap), and only the objective is comparable. Times are
    scaled by their largest before solving, because solvers' tolerances are absolute.

    A layer step that the solver cannot settle within `limit_s` takes the best plan
    found so far, the solver's or greedy's; the run's warnings say how often, and by how
    much such a plan may be slower than the optimum. Such a run depends on how fast this
    machine is.

    Args:
        solver: ``highs`` in process, ``cbc`` as a program that PuLP brings, ``auto``
            the first of the two that works.
        staging: at most so many experts that are not resident may go to each GPU
            (equation 9, counting copies only); ``none`` for no limit.
        limit_s: most seconds for one layer step; ``none`` for no limit.

    Source: DALI, equations 3-9.
    """

    def __init__(
        self,
        *,
        solver: Solver = "auto",
        staging: int | None = None,
        limit_s: float | None = 10.0,
    ) -> None:
        expect_choice("solver", solver, Solver)
        holds = staging is None or staging >= 0
        expect(holds, "staging", "a number >= 0 or none", staging)
        holds = limit_s is None or limit_s > 0.0
        expect(holds, "limit_s", "seconds > 0 or none", limit_s)
        self.staging = staging
        self.limit_s = limit_s
        self._named_solver = solver
        self._greedy = Greedy(staging=staging)
        self._unproven = 0
        self._widest_gap = 0.0

    def start(self, context: RunContext) -> None:
        """Make room."""
        self._greedy.start(context)
        self._gap_s: Floats = zeros(context.shape.experts)

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        """Build the program, solve it, read the lanes back."""
        problem, on_lane = self._program(work)
        # Importing it takes a tenth of a second, which a list of policies need not.
        problem.solve(_solver(self._named_solver, self.limit_s))
        # A tenth of a second that whoever only lists policies need not wait for.
        import pulp  # noqa: PLC0415

        is_optimal = problem.sol_status == pulp.LpSolutionOptimal
        if problem.status == pulp.LpStatusInfeasible or not (
            is_optimal or self.limit_s is not None
        ):
            raise PolicyError(
                f"ilp: solver answered {pulp.LpStatus[problem.status]!r}; try"
                " solver=cbc or solver=highs"
            )

        # Solvers answer 0.999… and 1e-9, so the largest share is the lane.
        share = np.array([[_value(choice) for choice in row] for row in on_lane])
        lane_of = share.argmax(axis=0).astype(np.int8)
        if not is_optimal:
            lane_of = self._best_so_far(
                work, view, lane_of, complete=_is_complete(share)
            )
        np.asarray(lanes)[:] = lane_of
        by_gap(work, self._gap_s, order)
        return 0

    def remarks(self) -> Sequence[str]:
        """How often the time limit ended the search, and what that may have cost."""
        if not self._unproven:
            return ()
        line = (
            f"ilp: the limit of {self.limit_s:g} s ended the search in"
            f" {self._unproven:,} layer steps; their plans are at most"
            f" {percent(self._widest_gap)} slower than the best (limit_s=none searches"
            " on)"
        )
        return [line]

    def _program(self, work: Work) -> tuple[Any, list[list[Any]]]:
        """The integer program, and its choices by lane and expert: None for no
        choice.
        """
        costs = modelled_costs(work)
        seen = work.arrays()
        lanes, active = costs.shape
        allowed = np.isfinite(costs)
        stuck = ~allowed.any(axis=0)
        allowed[CPU, stuck] = True
        costs[CPU, stuck] = 0.0
        # A layer step in which everything is free needs no scale.
        scale_s = max(costs[allowed].max(initial=0.0), seen.link_s.max()) or 1.0
        costs = costs / scale_s
        wait = seen.link_s / scale_s

        import pulp  # noqa: PLC0415 - as above

        problem = pulp.LpProblem("assignment", pulp.LpMinimize)
        makespan = problem.add_variable("z", lowBound=0.0)
        on_lane = [
            [
                problem.add_variable(f"x_{lane}_{i}", cat=pulp.LpBinary)
                if allowed[lane, i]
                else None
                for i in range(active)
            ]
            for lane in range(lanes)
        ]
        # The order of variables and rows decides which of several optima comes back.
        problem += makespan
        for lane in range(lanes):
            terms = [
                (choice, float(cost))
                for choice, cost in zip(on_lane[lane], costs[lane], strict=True)
                if choice is not None
            ]
            if lane and wait[lane - 1]:
                # An absent expert waits for the copy under way; the next ones, no more.
                waits = problem.add_variable(f"w_{lane}", lowBound=0.0)
                terms.append((waits, float(wait[lane - 1])))
                behind = seen.arrive_s[lane - 1] > seen.link_s[lane - 1]
                for absent_expert in np.flatnonzero(behind & allowed[lane]).tolist():
                    problem += waits >= on_lane[lane][absent_expert]
            problem += makespan >= pulp.LpAffineExpression(terms)
        for i in range(active):
            choices = [row[i] for row in on_lane if row[i] is not None]
            problem += pulp.lpSum(choices) == 1
        if self.staging is not None:
            for g in range(lanes - 1):
                absent = np.flatnonzero((seen.arrive_s[g] > 0.0) & allowed[1 + g])
                fetched = pulp.lpSum(on_lane[1 + g][i] for i in absent)
                problem += fetched <= self.staging
        return problem, on_lane

    def _best_so_far(
        self, work: Work, view: MachineView, lanes: np.ndarray, *, complete: bool
    ) -> np.ndarray:
        """The faster of greedy's lanes and of what the solver has found, if anything;
        notes how far from the optimum they may be.
        """
        best = np.zeros(work.active, np.int8)
        order = np.arange(work.active)
        self._greedy.assign(work, view, best.data, order.data)
        best_s = modelled_s(work, best)
        if complete and modelled_s(work, lanes) < best_s:
            best = lanes
            best_s = modelled_s(work, lanes)
        # A limit on staging can only raise the optimum above this bound.
        bound_s = optimal(work).bound_s
        self._unproven += 1
        if np.isfinite(best_s) and bound_s > 0.0:
            self._widest_gap = max(self._widest_gap, best_s / bound_s - 1.0)
        return best


def _value(choice: Any) -> float:
    """A variable's share of its lane; below every other where there is none."""
    if choice is None:
        return -1.0
    return float(choice.value() or 0.0)


def _is_complete(share: np.ndarray) -> bool:
    """Whether a solver's answer gives every expert one lane."""
    return bool((share.max(axis=0) > _MOSTLY).all())


# Every instance asks, but the answer does not change within a process.
@cache
def _solver(name: Solver, limit_s: float | None) -> Any:
    """The first usable solver that `name` allows, silent and exact.

    Raises:
        PolicyError: it cannot run here.
    """
    import pulp  # noqa: PLC0415 - as above

    exact = {"msg": False, "gapRel": 0.0, "threads": 1, "timeLimit": limit_s}
    makers = {
        "highs": lambda: pulp.HiGHS(**exact, mip_abs_gap=0.0),
        "cbc": lambda: pulp.PULP_CBC_CMD(**exact, gapAbs=0.0),
    }
    for candidate in makers if name == "auto" else (name,):
        solver = makers[candidate]()
        if solver.available():
            return solver
    raise PolicyError(
        f"solver: {name} cannot run here; install highspy, or PuLP with its CBC program"
    )

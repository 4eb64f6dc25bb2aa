"""The exact optimum of every layer step, as a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moesim.machine_code.functions import compiled
from moesim.policies.assignment._kernels import launch
from moesim.policies.assignment._optimum import modelled_optimum, scheduled_optimum
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import ASSIGN, AssignmentKernels, State, Work, state
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    import numpy as np

Objective = Literal["modelled", "scheduled"]


@compiled(ASSIGN)
def _modelled(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    _, best, _, launched = modelled_optimum(work)
    launch(lanes, order, best, launched)
    return False


@compiled(ASSIGN)
def _scheduled(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    _, best, _, launched = scheduled_optimum(work)
    launch(lanes, order, best, launched)
    return False


class Exact(CompiledAssignment):
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
        kernel = _modelled if objective == "modelled" else _scheduled
        self.brought = AssignmentKernels(kernel, state())

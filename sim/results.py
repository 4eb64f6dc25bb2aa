"""The answer of a replay, and what a drafted token takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from moesim.engine.planner import Planner
    from moesim.hwprofiles.costs import Costs


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


def draft_seconds(
    costs: Costs, planner: Planner, context_tokens: np.ndarray
) -> np.ndarray:
    """Seconds that drafting one token takes, float64 [P], before passes with these
    contexts, int64 [P].

    The model that drafts is taken to have the same dense parts, and to be on the GPU as
    a whole.
    """
    experts = planner.policies.draft_experts or planner.shape.top_k
    one_each = np.ones(len(context_tokens), np.int64)
    dense_s, _ = costs.dense_of_passes(one_each, context_tokens, one_each)
    draft_s = np.full(len(context_tokens), costs.head_s(1, 1))
    for layer in range(planner.shape.layers):
        expert_s = float(costs.gpu_s(layer, one_each[:1])[0])
        draft_s += dense_s + experts * expert_s
    return draft_s

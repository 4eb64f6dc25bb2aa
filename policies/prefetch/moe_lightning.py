"""MoE-Lightning's stream of weights: the next layer's planned experts, ahead of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.machine_code.functions import compiled
from moesim.policies.assignment.moe_lightning import planned, split_state
from moesim.policies.compiled import CompiledPrefetch
from moesim.policies.kernels import (
    PREFETCH,
    KernelView,
    PrefetchKernels,
    State,
    Work,
)
from moesim.policies.parameters import expect
from moesim.policies.prefetch._kernels import is_present

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.base import RunContext


@compiled(PREFETCH)
def _stream(state: State, work: Work, view: KernelView, named: np.ndarray) -> int:
    """Name what is absent of the next layer's planned experts, in ascending id."""
    layer = work.layer + 1
    experts, layers = state.integers[:2]
    if layer == layers:
        return 0
    plan = planned(state, work.phase, layer, work.rows, view.states)
    count = 0
    for key in range(layer * experts, (layer + 1) * experts):
        if plan[key] and not is_present(view.states, key):
            named[count] = key
            count += 1
    return count


class MoELightning(CompiledPrefetch):
    """Stream what the plan of the assignment policy of this name puts on a GPU, one
    layer ahead.

    The plan is fixed, so no gate has to be waited for: attention, dense parts and
    products of a layer hide the copies for the next one. Experts that nobody turns out
    to use come as well, as far as the link has begun with them.

    Args:
        tokens, undivided: as of the assignment policy, whose plan this one repeats.

    Source: MoE-Lightning (arXiv 2411.11217), its pipeline of paged weights, without
    the order of pages within a layer; a step's first layer is fetched on demand.
    """

    late = "drop"
    no_place = "wait"

    def __init__(self, *, tokens: int | None = None, undivided: bool = False) -> None:
        expect(tokens is None or tokens >= 1, "tokens", "a number >= 1 or none", tokens)
        self.tokens = tokens
        self.undivided = undivided

    def start(self, context: RunContext) -> None:
        """Begin without plans."""
        super().start(context)
        known = split_state(context, self.tokens, undivided=self.undivided)
        self.brought = PrefetchKernels(_stream, known)

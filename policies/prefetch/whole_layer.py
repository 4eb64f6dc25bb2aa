"""DeepSpeed's prefetch of complete layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moesim.machine_code.functions import compiled
from moesim.policies.compiled import CompiledPrefetch
from moesim.policies.kernels import (
    PREFETCH,
    KernelView,
    PrefetchKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect_choice
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.base import RunContext

Streamed = Literal["both", "prefill"]


_PREFILL = int(Phase.PREFILL)


@compiled(PREFETCH)
def _next_layer(state: State, work: Work, view: KernelView, named: np.ndarray) -> int:
    """Name the next layer in ascending id; and a step's first layer itself. The state's
    integers: whether in prefill alone; E.
    """
    if state.integers[0] and work.phase != _PREFILL:
        return 0
    keys = view.states.shape[1]
    experts = state.integers[1]
    count = 0
    # All of them, present ones too: the planner drops those.
    if work.layer == 0:
        for expert in range(experts):
            named[count] = expert
            count += 1
    first = (work.layer + 1) * experts
    for key in range(first, min(first + experts, keys)):
        named[count] = key
        count += 1
    return count


class WholeLayer(CompiledPrefetch):
    """Prefetch all experts of the next layer, whether they will be used or not.

    With no cache and staging for two layers a layer costs the longer of computing it
    and moving all its experts: its products wait until every copy has landed. A step's
    first layer, which nothing precedes, is moved as a whole when its own turn comes.

    Args:
        phase: ``both``, or ``prefill`` for engines that stream layers through the GPU
            while they read a prompt, and decode where the weights are.

    Source: DeepSpeed ZeRO-Inference; our reference, section 6.5. Streamed prefill:
    krasis (brontoguana), its GPU prefill.
    """

    late = "wait"
    no_place = "wait"

    def __init__(self, *, phase: Streamed = "both") -> None:
        expect_choice("phase", phase, Streamed)
        self.phase = phase
        self.ahead = 0

    def start(self, context: RunContext) -> None:
        """Learn how many experts a layer has."""
        super().start(context)
        rule = state(integers=[self.phase == "prefill", context.shape.experts])
        self.brought = PrefetchKernels(_next_layer, rule)

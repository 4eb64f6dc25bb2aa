"""KTransformers' fixed mapping: an expert is computed where its weights are."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.assignment._kernels import (
    ascending,
    flying,
    launch,
    some_gpu,
    spread,
)
from moesim.policies.base import DEFERRED
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import ASSIGN, AssignmentKernels, State, Work, state
from moesim.policies.parameters import expect, expect_choice
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

Prefill = Literal["mapped", "gpu"]

PREFILL = int(Phase.PREFILL)


@compiled(ASSIGN)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    waits = state.integers[0] != 0
    fetches = state.integers[1] != 0
    present = work.arrive_s == 0.0
    if waits:
        present |= flying(work.gpu_state, work.arrive_s)
    chosen = some_gpu(present)
    if fetches and work.phase == PREFILL:
        present = np.ones((0, 0), np.bool_)
        chosen = np.ones(len(lanes), np.bool_)
    placed = spread(chosen, present, work.gpu_s, work.arrive_s, work.link_s)
    launch(lanes, order, placed, ascending(len(lanes)))
    for i in range(len(work.ranks)):
        if lanes[i] == 0 and work.ranks[i] >= state.integers[2]:
            lanes[i] = DEFERRED
    return False


class FixedMapping(CompiledAssignment):
    """Compute resident experts on their GPU and all others on the CPU, both at the same
    time; never fetch on demand.

    The cache decides what is resident: with a static one this is KTransformers'
    placement masks (``frequency``, ``uniform``, ``front-loading`` and ``random`` are
    ways to fill it); with any other it is the usual "cached on the GPU, uncached on the
    CPU".

    An expert resident on several GPUs goes to the one that would finish it first.

    Args:
        wait: experts in flight are awaited on their GPU instead of being computed on
            the CPU; off, as masks know nothing that is on its way.
        prefill: ``mapped`` treats a prompt like decode (kt-kernel's masks, the
            default); ``gpu`` fetches what is absent and computes nothing on the CPU, as
            KTransformers' rule for DeepSeek-V2-Lite has it, and HybriMoE's account.
        defer: experts of each token, those with the lowest gate scores, whose results
            join one layer later if the CPU computes them: expert deferral. One that is
            among the others of any token of the batch joins at once. In decode alone,
            as the paper has it, and in every layer but the last, as the code.

    Source: KTransformers (SOSP 2025), kt-kernel's GPU expert masks and its
    ``max_deferred_experts_per_token``; "fixed mapping" as HybriMoE (arXiv 2504.05897)
    calls it.
    """

    calibrates_planning: ClassVar[bool] = True

    def __init__(
        self, *, wait: bool = False, prefill: Prefill = "mapped", defer: int = 0
    ) -> None:
        expect_choice("prefill", prefill, Prefill)
        expect(defer >= 0, "defer", "a number >= 0", defer)
        self.wait = wait
        self.prefill = prefill
        self.defer = defer
        self.defers = self.approximates = defer > 0
        rules = [wait, prefill == "gpu", 0]
        self.brought = AssignmentKernels(_assign, state(integers=rules))

    def start(self, context: RunContext) -> None:
        """Count the experts of a token that are never deferred."""
        self.brought.state.integers[2] = context.shape.top_k - self.defer

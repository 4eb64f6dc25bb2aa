"""KTransformers' fixed mapping: an expert is computed where its weights are."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.assignment._kernels import (
    ascending,
    flying,
    launch,
    some_gpu,
    spread,
)
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import ASSIGN, AssignmentKernels, State, Work, state
from moesim.policies.parameters import expect_choice
from moesim.traces.format.schema import Phase

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

    Source: KTransformers, kt-kernel's GPU expert masks; "fixed mapping" as HybriMoE
    (arXiv 2504.05897) calls it.
    """

    calibrates_planning: ClassVar[bool] = True

    def __init__(self, *, wait: bool = False, prefill: Prefill = "mapped") -> None:
        expect_choice("prefill", prefill, Prefill)
        self.wait = wait
        self.prefill = prefill
        rules = [wait, prefill == "gpu"]
        self.brought = AssignmentKernels(_assign, state(integers=rules))

"""HybriMoE's assignment as its released code does it: one list, two pointers."""

from __future__ import annotations

from typing import Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.assignment._kernels import launch, transfers
from moesim.policies.assignment._two_pointer import head_and_tail
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import ASSIGN, AssignmentKernels, State, Work, state
from moesim.policies.parameters import expect_choice
from moesim.traces.format.schema import Phase

Prefill = Literal["gpu", "schedule"]
Costs = Literal["machine", "released"]

PREFILL = int(Phase.PREFILL)

# The released file's own numbers, in arbitrary units.
_CPU_PER_TOKEN = 1.0
_CPU_FIRST = 0.79
_GPU = 0.5
_COPY = 0.4179


@compiled(ASSIGN)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    active = len(work.experts)
    cpu_s = work.cpu_s.copy()
    gpu_s = work.gpu_s.copy()
    arrive_s = transfers(work.arrive_s, work.link_s)
    first_s = work.first_cpu_s
    if state.integers[0]:
        first_s = _CPU_FIRST
        for i in range(active):
            cpu_s[i] = _CPU_PER_TOKEN * work.tokens[i]
            for g in range(len(gpu_s)):
                gpu_s[g, i] = _GPU
                arrive_s[g, i] = _COPY if work.arrive_s[g, i] > 0.0 else 0.0
    if state.integers[1] and work.phase == PREFILL:
        # A CPU that takes forever leaves every expert to the GPUs.
        first_s = 0.0
        for i in range(active):
            cpu_s[i] = np.inf
    placed, decided = head_and_tail(
        work.tokens, cpu_s, gpu_s, arrive_s, work.gpu_state, first_s
    )
    launch(lanes, order, placed, decided)
    return False


class HybriMoEReleased(CompiledAssignment):
    """Sort experts by load, cached ones first; give the head of the list to the GPU or
    its tail to the CPU, whichever would end sooner.

    The GPU's candidate is the head, after its copy if it is uncached; the CPU's is the
    tail. The one that would end no later than the other is committed, ties to the GPU.
    So, unlike in the paper, copies go in list order, and the CPU steals nothing before
    the uncached experts have run out.

    Args:
        prefill: ``gpu`` computes every expert of a prefill on the GPU, as the release
            does; ``schedule`` uses the two pointers there too.
        costs: ``machine`` takes this machine's seconds (the file's own numbers are
            marked to be tuned); ``released`` those numbers, in arbitrary units: 1 per
            token on the CPU, 0.79 for its first expert, 0.5 on the GPU, 0.4179 for a
            copy.

    Source: HybriMoE, `ktransformers/operators/experts.py`, class `HSS`.
    """

    def __init__(self, *, prefill: Prefill = "gpu", costs: Costs = "machine") -> None:
        expect_choice("prefill", prefill, Prefill)
        expect_choice("costs", costs, Costs)
        self.prefill = prefill
        self.costs = costs
        rules = [costs == "released", prefill == "gpu"]
        self.brought = AssignmentKernels(_assign, state(integers=rules))

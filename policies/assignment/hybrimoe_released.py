"""HybriMoE's assignment as its released code does it: one list, two pointers."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Literal

from moesim.policies.assignment._two_pointer import TwoPointers
from moesim.policies.names import PREFILL
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work

Prefill = Literal["gpu", "schedule"]
Costs = Literal["machine", "released"]

# The released file's own numbers, in arbitrary units.
CPU_PER_TOKEN = 1.0
CPU_FIRST = 0.79
GPU = 0.5
COPY = 0.4179


class HybriMoEReleased(TwoPointers):
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
        self.fetches_prompts = prefill == "gpu"
        self.own_costs = costs == "released"

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        self.take_costs(work)
        first_s = work.first_cpu_s
        if self.own_costs:
            self._take_released(work)
            first_s = CPU_FIRST
        if self.fetches_prompts and work.phase == PREFILL:
            # A CPU that takes forever leaves every expert to the GPUs.
            first_s = 0.0
            for i in range(work.active):
                self.cpu_s[i] = inf
        self.head_and_tail(work, first_s, lanes, order)
        return 0

    def _take_released(self, work: Work) -> None:
        for i in range(work.active):
            self.cpu_s[i] = CPU_PER_TOKEN * work.tokens[i]
            for g in range(work.gpus):
                self.gpu_s[g, i] = GPU
                self.arrive_s[g, i] = COPY if work.arrive_s[g, i] > 0.0 else 0.0

"""HybriMoE's assignment as its released code does it: one list, two pointers."""

from __future__ import annotations

from typing import Literal

import numpy as np

from moesim.policies.assignment._gpu_choice import first_cpu_s, gpu_state, transfer_s
from moesim.policies.assignment._two_pointer import head_and_tail
from moesim.policies.base import Assignment, AssignmentPolicy, LayerWork, MachineView
from moesim.policies.parameters import expect_choice
from moesim.traces.format.schema import Phase

Prefill = Literal["gpu", "schedule"]
Costs = Literal["machine", "released"]

# The released file's own numbers, in arbitrary units.
_CPU_PER_TOKEN = 1.0
_CPU_FIRST = 0.79
_GPU = 0.5
_COPY = 0.4179


class HybriMoEReleased(AssignmentPolicy):
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
        self._first_s: float | None = None

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Place by two pointers."""
        # The view's constant is read once: it does not change within a run.
        if self._first_s is None:
            self._first_s = first_cpu_s(view) if self.costs == "machine" else _CPU_FIRST

        cpu_s = work.cpu_s
        gpu_s = work.gpu_s
        arrive_s = transfer_s(work)
        first_s = self._first_s
        if self.costs == "released":
            cpu_s = _CPU_PER_TOKEN * work.tokens
            gpu_s = np.full_like(work.gpu_s, _GPU)
            arrive_s = np.where(work.arrive_s > 0.0, _COPY, 0.0)
        if self.prefill == "gpu" and work.phase == Phase.PREFILL:
            # A CPU that takes forever leaves every expert to the GPUs.
            cpu_s = np.full(len(cpu_s), np.inf)
            first_s = 0.0

        lanes_and_order = head_and_tail(
            work.tokens,
            cpu_s,
            gpu_s,
            arrive_s,
            gpu_state(work, view),
            first_s,
        )
        return Assignment(*lanes_and_order)

"""What assignments share: costs, greedy's order, the choice among several GPUs.

A active experts, E experts of a layer, G GPUs. Lane 0 is the CPU, lane 1 + g is GPU g.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.base import AssignmentPolicy
from moesim.policies.names import CPU, IN_FLIGHT

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext


def flying(work: Work, gpu: int, i: int) -> bool:
    """Whether an expert is on its way to a GPU; one that lands this very moment is
    there.
    """
    return work.gpu_state[gpu, i] == IN_FLIGHT and work.arrive_s[gpu, i] > 0.0


def transfer_s(work: Work, gpu: int, i: int) -> float:
    """Seconds until an expert's weights are on a GPU, without the wait for the copy
    under way: what is in flight lands with that copy, what is absent after it.
    """
    arrive_s = work.arrive_s[gpu, i]
    if arrive_s > work.link_s[gpu]:
        arrive_s -= work.link_s[gpu]
    return arrive_s


def by_gap(work: Work, gap_s: Floats, order: Ints) -> None:
    """Order positions by |t_gpu - t_cpu|, largest first, ties to the lower position.

    t_gpu is the best GPU's. An expert costs computing, or the weights' arrival where
    that takes longer.

    Args:
        work: the layer step.
        gap_s: float64 [E], room.
        order: int64 [A], filled in.

    Source: DALI, equation 5 and Alg. 1.
    """
    for i in range(work.active):
        best_s = inf
        for gpu in range(work.gpus):
            best_s = min(best_s, max(work.arrive_s[gpu, i], work.gpu_s[gpu, i]))
        gap_s[i] = abs(best_s - max(work.host_s[i], work.cpu_s[i]))
        j = i
        while j > 0 and gap_s[order[j - 1]] < gap_s[i]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = i


class SpreadAssignment(AssignmentPolicy):
    """Base of rules that say where an expert *may* run on a GPU: it then does, on the
    GPU that would finish it first. What may run on none is left to the CPU.

    Attributes:
        allowed: uint8 [G, E], 1 where an active expert may run on a GPU; `assign` fills
            in the first A of each row, then calls `spread`.
    """

    def start(self, context: RunContext) -> None:
        """Make room."""
        self.allowed: Ints = zeros((context.gpus, context.shape.experts), np.uint8)
        self.load_s: Floats = zeros(context.gpus)
        self.waited_s: Floats = zeros(context.gpus)

    def allow(self, work: Work, i: int) -> None:
        """Let an expert run on every GPU."""
        for gpu in range(work.gpus):
            self.allowed[gpu, i] = 1

    def allow_all(self, work: Work, allowed: bool) -> None:
        """Let all experts run on every GPU, or on none."""
        for gpu in range(work.gpus):
            for i in range(work.active):
                self.allowed[gpu, i] = allowed

    def allow_residents(self, work: Work) -> None:
        """Let every expert run where it is, and nowhere else."""
        for gpu in range(work.gpus):
            for i in range(work.active):
                self.allowed[gpu, i] = work.arrive_s[gpu, i] == 0.0

    def spread(self, work: Work, lanes: Ints) -> None:
        """Place experts, in ascending id, on GPUs that are allowed; ties to the lower
        GPU.

        That is greedy's rule on a machine whose CPU takes forever.
        """
        for gpu in range(work.gpus):
            self.load_s[gpu] = self.waited_s[gpu] = 0.0
        for i in range(work.active):
            lanes[i] = self._fastest(work, i)

    def _fastest(self, work: Work, i: int) -> int:
        """The lane that takes an expert; notes its load."""
        if work.gpus == 1:
            return self.allowed[0, i]
        chosen = CPU
        end_s = inf
        for gpu in range(work.gpus - 1, -1, -1):
            if not self.allowed[gpu, i]:
                continue
            arrive_s = work.arrive_s[gpu, i]
            if arrive_s > work.link_s[gpu]:
                # Only the first absent one waits for the copy under way.
                arrive_s -= self.waited_s[gpu]
            lane_s = self.load_s[gpu] + max(arrive_s, work.gpu_s[gpu, i])
            if lane_s <= end_s:
                chosen = 1 + gpu
                end_s = lane_s
        if chosen == CPU:
            return chosen
        gpu = chosen - 1
        self.load_s[gpu] = end_s
        if work.arrive_s[gpu, i] > work.link_s[gpu]:
            self.waited_s[gpu] = work.link_s[gpu]
        return chosen

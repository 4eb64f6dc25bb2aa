"""Fiddler's assignment: load an expert's weights only if that beats computing it on the
CPU.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.assignment._placing import SpreadAssignment, flying
from moesim.policies.names import SERIAL
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

Cost = Literal["load", "load+compute"]
Issue = Literal["serial", "parallel"]


class Fiddler(SpreadAssignment):
    """Compute residents on the GPU, and an absent expert there too if loading it takes
    no longer than the CPU.

    The code searches all 2^8 placements for the smallest *sum* of costs, which is this
    independent comparison; ties go to the GPU, and a resident costs nothing there, so
    the CPU never gets one (`static-threshold` compares residents too). Residents are
    launched first, then loads, each in ascending id. With several GPUs the one that
    would finish first takes the expert.

    Args:
        issue: ``serial`` starts the CPU when the loaded experts are done, as the
            release issues them (residents, whose kernels are asynchronous, still
            overlap the CPU); ``parallel`` overlaps loads and CPU too. The decision,
            being a sum, is the same for both.
        cost: what the CPU is compared with: ``load``, the time until the weights are on
            the GPU (the release's constant is that alone); ``load+compute`` adds the
            expert's time there.

    Source: Fiddler (arXiv 2402.07033), `src/fiddler/mixtral.py`.
    """

    def __init__(self, *, cost: Cost = "load", issue: Issue = "serial") -> None:
        expect_choice("cost", cost, Cost)
        expect_choice("issue", issue, Issue)
        self.adds_compute = cost == "load+compute"
        self.flags = SERIAL if issue == "serial" else 0

    def start(self, context: RunContext) -> None:
        """Make room."""
        SpreadAssignment.start(self, context)
        self.loaded: Ints = zeros(context.shape.experts, np.uint8)

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        self.allow_all(work, False)
        for i in range(work.active):
            if self._cost_s(work, i) <= max(work.host_s[i], work.cpu_s[i]):
                self.allow(work, i)
        self.spread(work, lanes)
        count = 0
        for loads in range(2):
            for i in range(work.active):
                if self.loaded[i] == loads:
                    order[count] = i
                    count += 1
        return self.flags

    def _cost_s(self, work: Work, i: int) -> float:
        """What an expert costs on a GPU; notes whether it has to be loaded."""
        best_s = inf
        self.loaded[i] = 1
        for gpu in range(work.gpus):
            # The load of a copy in flight is paid for already.
            load_s = 0.0 if flying(work, gpu, i) else work.arrive_s[gpu, i]
            if load_s <= 0.0:
                self.loaded[i] = 0
            elif self.adds_compute:
                load_s += work.gpu_s[gpu, i]
            best_s = min(best_s, load_s)
        return best_s

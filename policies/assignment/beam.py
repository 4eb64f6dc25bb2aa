"""Greedy with second thoughts: several partial assignments stay alive."""

from __future__ import annotations

from moesim.policies.base import Assignment, AssignmentPolicy, LayerWork, MachineView
from moesim.policies.kernels import beam
from moesim.policies.parameters import expect


class Beam(AssignmentPolicy):
    """Take experts in greedy's order and keep the `width` partial assignments with the
    smallest makespan.

    Costs and launch order are greedy's. Equal makespans rank by the smaller sum of lane
    loads, then by order of generation (better parent first, GPUs before the CPU). Not
    always better than greedy: a beam may drop the start that greedy's rule would have
    kept.

    Args:
        width: assignments kept after each expert; the paper's is 2. From ``2 **
            active`` on it is exhaustive.

    Source: DALI, appendix A.2 (which gives no tie rule).
    """

    def __init__(self, *, width: int = 2) -> None:
        expect(width >= 1, "width", "a number >= 1", width)
        self.width = width

    def assign(self, work: LayerWork, view: MachineView) -> Assignment:
        """Place by the best complete assignment found."""
        del view
        return Assignment(
            *beam(work.cpu_s, work.host_s, work.gpu_s, work.arrive_s, self.width)
        )

"""DALI's beam search: several partial assignments are kept at a time."""

from __future__ import annotations

from typing import ClassVar

from moesim.policies.assignment._gpu_choice import link_s
from moesim.policies.assignment._kernels import beam
from moesim.policies.base import Assignment, AssignmentPolicy, LayerWork, MachineView
from moesim.policies.parameters import expect


class Beam(AssignmentPolicy):
    """Assign experts in greedy's order, keeping the `width` best partial assignments.

    Best is the smallest makespan; costs and launch order are greedy's. Equal makespans
    rank by the smaller sum of lane loads, then by order of generation (better parent
    first, GPUs before the CPU). Not always better than greedy: a beam may drop the
    start that greedy's rule would have kept.

    Args:
        width: assignments kept after each expert; the paper's is 2. From ``2 **
            active`` on it is exhaustive.

    Source: DALI, appendix A.2 (which gives no tie rule).
    """

    calibrates_planning: ClassVar[bool] = True

    def __init__(self, *, width: int = 2) -> None:
        expect(width >= 1, "width", "a number >= 1", width)
        self.width = width

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Place by the best complete assignment of the search."""
        del view
        lanes_and_order = beam(
            work.cpu_s,
            work.host_s,
            work.gpu_s,
            work.arrive_s,
            link_s(work),
            self.width,
        )
        return Assignment(*lanes_and_order)

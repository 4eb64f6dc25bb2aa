"""DALI's beam search: several partial assignments are kept at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.assignment._placing import by_gap
from moesim.policies.base import AssignmentPolicy
from moesim.policies.names import CPU
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext


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

    def start(self, context: RunContext) -> None:
        """Make room: choices of every expert, parents and children of one."""
        experts = context.shape.experts
        loads = (self.width, 1 + context.gpus)
        self.gap_s: Floats = zeros(experts)
        self.load_s: Floats = zeros(loads)
        self.parent_load_s: Floats = zeros(loads)
        # Whether a lane has waited for the copy under way on its link.
        self.waited: Ints = zeros(loads, np.uint8)
        self.parent_waited: Ints = zeros(loads, np.uint8)
        self.end_s: Floats = zeros(self.width)
        self.sum_s: Floats = zeros(self.width)
        self.added_s: Floats = zeros(self.width)
        self.parent: Ints = zeros((experts, self.width), np.int64)
        self.chosen: Ints = zeros((experts, self.width), np.int8)

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        by_gap(work, self.gap_s, order)
        for lane in range(work.gpus + 1):
            self.load_s[0, lane] = 0.0
            self.waited[0, lane] = 0
        beams = 1
        for n in range(work.active):
            load_s = self.load_s
            self.load_s = self.parent_load_s
            self.parent_load_s = load_s
            waited = self.waited
            self.waited = self.parent_waited
            self.parent_waited = waited
            beams = self._choose(work, n, order[n], beams)
            for rank in range(beams):
                self._follow(work, n, order[n], rank)
        # The best comes first; its lanes are read back parent by parent.
        rank = 0
        for n in range(work.active - 1, -1, -1):
            lanes[order[n]] = self.chosen[n, rank]
            rank = self.parent[n, rank]
        return 0

    def _choose(self, work: Work, n: int, i: int, beams: int) -> int:
        """Rank the children of all parents that the n-th expert, `i`, has; how many are
        kept.
        """
        lanes = work.gpus + 1
        kept = 0
        for child in range(beams * lanes):
            parent = child // lanes
            # Lanes 1, 2, …, 0: the CPU's child is generated last, so GPUs win ties.
            lane = (child + 1) % lanes
            added_s = self._added_s(work, i, parent, lane)
            lane_s = self.parent_load_s[parent, lane] + added_s
            makespan_s = lane_s
            total_s = 0.0
            for other in range(lanes):
                makespan_s = max(makespan_s, self.parent_load_s[parent, other])
                total_s += self.parent_load_s[parent, other]
            total_s = total_s - self.parent_load_s[parent, lane] + lane_s

            rank = kept
            while rank > 0 and self._is_better(makespan_s, total_s, rank - 1):
                rank -= 1
            if rank == self.width:
                continue
            kept = min(kept + 1, self.width)
            for j in range(kept - 1, rank, -1):
                self.end_s[j] = self.end_s[j - 1]
                self.sum_s[j] = self.sum_s[j - 1]
                self.added_s[j] = self.added_s[j - 1]
                self.parent[n, j] = self.parent[n, j - 1]
                self.chosen[n, j] = self.chosen[n, j - 1]
            self.end_s[rank] = makespan_s
            self.sum_s[rank] = total_s
            self.added_s[rank] = added_s
            self.parent[n, rank] = parent
            self.chosen[n, rank] = lane
        return kept

    def _is_better(self, makespan_s: float, total_s: float, rank: int) -> bool:
        if makespan_s != self.end_s[rank]:
            return makespan_s < self.end_s[rank]
        return total_s < self.sum_s[rank]

    def _added_s(self, work: Work, i: int, parent: int, lane: int) -> float:
        """Seconds that an expert adds to a lane of a partial assignment."""
        if lane == CPU:
            return max(work.host_s[i], work.cpu_s[i])
        arrive_s = work.arrive_s[lane - 1, i]
        link_s = work.link_s[lane - 1]
        if arrive_s <= link_s:
            return max(arrive_s, work.gpu_s[lane - 1, i])
        # Only the first absent one waits for the copy under way.
        added_s = max(arrive_s - link_s, work.gpu_s[lane - 1, i])
        if not self.parent_waited[parent, lane]:
            added_s += link_s
        return added_s

    def _follow(self, work: Work, n: int, i: int, rank: int) -> None:
        """Make the loads of a child that is kept."""
        parent = self.parent[n, rank]
        for lane in range(work.gpus + 1):
            self.load_s[rank, lane] = self.parent_load_s[parent, lane]
            self.waited[rank, lane] = self.parent_waited[parent, lane]
        lane = self.chosen[n, rank]
        self.load_s[rank, lane] += self.added_s[rank]
        if lane != CPU and work.arrive_s[lane - 1, i] > work.link_s[lane - 1]:
            self.waited[rank, lane] = 1

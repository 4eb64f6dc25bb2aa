"""Fiddler's assignment: load an expert's weights only if that beats computing it on the
CPU.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from moesim.policies.assignment._gpu_choice import gpu_lanes, in_flight
from moesim.policies.base import Assignment, AssignmentPolicy, LayerWork, MachineView
from moesim.policies.parameters import expect_choice

Cost = Literal["load", "load+compute"]
Issue = Literal["serial", "parallel"]


class Fiddler(AssignmentPolicy):
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
        self.cost = cost
        self.serial = issue == "serial"

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Place each expert by its own comparison."""
        # The load of a copy in flight is paid for already.
        load_s = np.where(in_flight(work, view), 0.0, work.arrive_s)
        gpu_s = load_s
        if self.cost == "load+compute":
            gpu_s = load_s + np.where(load_s > 0.0, work.gpu_s, 0.0)

        cpu_s = np.maximum(work.host_s, work.cpu_s)
        on_gpu = gpu_s.min(axis=0) <= cpu_s
        order = np.argsort(load_s.min(axis=0) > 0.0, kind="stable")
        return Assignment(gpu_lanes(work, on_gpu), order, self.serial)

"""Expert offloading without CPU compute: what is not on the GPU is waited for."""

from __future__ import annotations

import numpy as np
from moesim.policies.base import Assignment, AssignmentPolicy, LayerWork, MachineView
from moesim.policies.kernels import UNLIMITED, greedy


class OnDemand(AssignmentPolicy):
    """Compute every active expert on a GPU, fetching the absent ones.

    With several GPUs each expert, in ascending id, goes to the GPU that would finish it
    first, ties to the lower GPU: the greedy rule on a machine whose CPU takes forever.

    Source: Mixtral-Offloading; "MoE-OnDemand" of DAOP.
    """

    def assign(self, work: LayerWork, view: MachineView) -> Assignment:
        """Place all on GPUs, in ascending expert id."""
        del view
        if len(work.gpu_s) == 1:
            lanes = np.empty(len(work.experts), np.int8)
            lanes.fill(1)
            return Assignment(lanes)
        never = np.full(len(work.experts), np.inf)
        return Assignment(greedy(never, never, work.gpu_s, work.arrive_s, UNLIMITED)[0])

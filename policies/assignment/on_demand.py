"""Expert offloading without CPU compute: absent experts are fetched and awaited."""

from __future__ import annotations

import numpy as np

from moesim.policies.assignment import _kernels
from moesim.policies.assignment._gpu_choice import gpu_lanes
from moesim.policies.assignment._kernels import ascending, launch, spread
from moesim.policies.base import Assignment, AssignmentPolicy, LayerWork, MachineView
from moesim.policies.kernels import ASSIGN, AssignmentKernels, State, Work
from moesim.traces.compilation import linked


@linked(ASSIGN, _kernels)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    everything = np.ones(len(lanes), np.bool_)
    anywhere = np.ones((0, 0), np.bool_)
    placed = spread(everything, anywhere, work.gpu_s, work.arrive_s, work.link_s)
    launch(lanes, order, placed, ascending(len(lanes)))
    return False


class OnDemand(AssignmentPolicy):
    """Compute every active expert on a GPU, fetching the absent ones.

    With several GPUs each expert, in ascending id, goes to the GPU that would finish it
    first, ties to the lower GPU: the greedy rule on a machine whose CPU takes forever.

    Source: Mixtral-Offloading; "MoE-OnDemand" of DAOP.
    """

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Place all on GPUs, in ascending expert id."""
        del view
        if len(work.gpu_s) == 1:
            # Nothing to choose; `fill` writes without a temporary array.
            lanes = np.empty(len(work.experts), np.int8)
            lanes.fill(1)
            return Assignment(lanes)
        return Assignment(gpu_lanes(work, np.ones(len(work.experts), np.bool_)))

    def kernels(self) -> AssignmentKernels:
        """The same in compiled runs."""
        return AssignmentKernels(_assign)

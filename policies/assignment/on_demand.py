"""Expert offloading without CPU compute: absent experts are fetched and awaited."""

from __future__ import annotations

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.assignment._kernels import ascending, launch, spread
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import ASSIGN, AssignmentKernels, State, Work


@compiled(ASSIGN)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    everything = np.ones(len(lanes), np.bool_)
    anywhere = np.ones((0, 0), np.bool_)
    placed = spread(everything, anywhere, work.gpu_s, work.arrive_s, work.link_s)
    launch(lanes, order, placed, ascending(len(lanes)))
    return False


class OnDemand(CompiledAssignment):
    """Compute every active expert on a GPU, fetching the absent ones.

    With several GPUs each expert, in ascending id, goes to the GPU that would finish it
    first, ties to the lower GPU: the greedy rule on a machine whose CPU takes forever.

    Source: Mixtral-Offloading; "MoE-OnDemand" of DAOP.
    """

    brought = AssignmentKernels(_assign)

"""The CPU-only control: no routed expert runs on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.machine_code.functions import compiled
from moesim.policies.base import (
    CPU,
)
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import ASSIGN, AssignmentKernels, State, Work

if TYPE_CHECKING:
    import numpy as np


@compiled(ASSIGN)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    for i in range(len(lanes)):
        lanes[i] = CPU
        order[i] = i
    return False


class AllCPU(CompiledAssignment):
    """Compute every active expert on the CPU; fetch nothing on demand.

    Source: the control "Naive" of DALI, section 6.3.
    """

    places_on_gpu = False
    brought = AssignmentKernels(_assign)

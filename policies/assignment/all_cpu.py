"""The naive control: the GPU sees no routed expert."""

from __future__ import annotations

import numpy as np
from moesim.policies.base import (
    CPU,
    Assignment,
    AssignmentPolicy,
    LayerWork,
    MachineView,
)


class AllCPU(AssignmentPolicy):
    """Compute every active expert on the CPU; nothing is ever fetched on demand.

    Source: the control "Naive" of DALI, section 6.3.
    """

    def assign(self, work: LayerWork, view: MachineView) -> Assignment:
        """Place all on the CPU, in ascending expert id."""
        del view
        return Assignment(np.full(len(work.experts), CPU, np.int8))

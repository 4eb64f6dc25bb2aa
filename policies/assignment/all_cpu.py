"""The CPU-only control: no routed expert runs on the GPU."""

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
    """Compute every active expert on the CPU; fetch nothing on demand.

    Source: the control "Naive" of DALI, section 6.3.
    """

    places_on_gpu = False

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Place all on the CPU, in ascending expert id."""
        del view
        return Assignment(np.full(len(work.experts), CPU, np.int8))

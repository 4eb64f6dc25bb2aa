"""The CPU-only control: no routed expert runs on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.policies.base import AssignmentPolicy

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work


class AllCPU(AssignmentPolicy):
    """Compute every active expert on the CPU; fetch nothing on demand.

    Source: the control "Naive" of DALI, section 6.3.
    """

    places_on_gpu: ClassVar[bool] = False

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        # All lanes are the CPU's already.
        return 0

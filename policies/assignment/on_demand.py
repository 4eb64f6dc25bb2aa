"""Expert offloading without CPU compute: absent experts are fetched and awaited."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.assignment._placing import SpreadAssignment

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work


class OnDemand(SpreadAssignment):
    """Compute every active expert on a GPU, fetching the absent ones.

    With several GPUs each expert, in ascending id, goes to the GPU that would finish it
    first, ties to the lower GPU: the greedy rule on a machine whose CPU takes forever.

    Source: Mixtral-Offloading; "MoE-OnDemand" of DAOP.
    """

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        self.allow_all(work, True)
        self.spread(work, lanes)
        return 0

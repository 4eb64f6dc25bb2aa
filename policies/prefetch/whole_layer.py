"""DeepSpeed's prefetch of complete layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.base import ExpertKey, PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView


class WholeLayer(PrefetchPolicy):
    """Prefetch all experts of the next layer, whether they will be used or not.

    With no cache and staging for two layers a layer costs the longer of computing it
    and moving all its experts, by the link's queue; copies that are late are waited
    for. Two departures: a layer step waits for its active experts only, so the last
    inactive ones may still be on their way in the next; and a step's first layer is
    fetched on demand, so its inactive experts are not moved.

    Source: DeepSpeed ZeRO-Inference; our reference, section 6.5.
    """

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Name the next layer in ascending id."""
        # All of them, present ones too: the planner drops those.
        layer = work.layer + 1
        if layer >= view.layers:
            return ()
        return [ExpertKey(layer, expert) for expert in range(view.experts)]

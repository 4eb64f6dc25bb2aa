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
    and moving all its experts: its products wait until every copy has landed. A step's
    first layer, which nothing precedes, is moved as a whole when its own turn comes.

    Source: DeepSpeed ZeRO-Inference; our reference, section 6.5.
    """

    late = "wait"
    no_place = "wait"

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Name the next layer in ascending id; and a step's first layer itself."""
        # All of them, present ones too: the planner drops those.
        layers = [0] if work.layer == 0 else []
        if work.layer + 1 < view.layers:
            layers.append(work.layer + 1)
        experts = range(view.experts)
        return [ExpertKey(layer, expert) for layer in layers for expert in experts]

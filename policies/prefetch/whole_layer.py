"""DeepSpeed's prefetch of complete layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moesim.policies.base import ExpertKey, PrefetchPolicy
from moesim.policies.parameters import expect_choice
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView

Streamed = Literal["both", "prefill"]


class WholeLayer(PrefetchPolicy):
    """Prefetch all experts of the next layer, whether they will be used or not.

    With no cache and staging for two layers a layer costs the longer of computing it
    and moving all its experts: its products wait until every copy has landed. A step's
    first layer, which nothing precedes, is moved as a whole when its own turn comes.

    Args:
        phase: ``both``, or ``prefill`` for engines that stream layers through the GPU
            while they read a prompt, and decode where the weights are.

    Source: DeepSpeed ZeRO-Inference; our reference, section 6.5. Streamed prefill:
    krasis (brontoguana), its GPU prefill.
    """

    late = "wait"
    no_place = "wait"

    def __init__(self, *, phase: Streamed = "both") -> None:
        expect_choice("phase", phase, Streamed)
        self.phase = phase

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Name the next layer in ascending id; and a step's first layer itself."""
        if self.phase == "prefill" and work.phase != Phase.PREFILL:
            return []
        # All of them, present ones too: the planner drops those.
        layers = [0] if work.layer == 0 else []
        if work.layer + 1 < view.layers:
            layers.append(work.layer + 1)
        experts = range(view.experts)
        return [ExpertKey(layer, expert) for layer in layers for expert in experts]

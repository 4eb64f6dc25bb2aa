"""DeepSpeed's prefetch of complete layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moesim.policies.base import PrefetchPolicy
from moesim.policies.names import PREFILL
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work

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

    def __init__(self, *, phase: Streamed = "both") -> None:
        expect_choice("phase", phase, Streamed)
        self.prefill_only = phase == "prefill"

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        """Name the next layer in ascending id; and a step's first layer itself."""
        if self.prefill_only and work.phase != PREFILL:
            return 0
        count = 0
        # All of them, present ones too: the planner drops those.
        if work.layer == 0:
            for expert in range(view.experts):
                named[count] = expert
                count += 1
        if work.layer + 1 < view.layers:
            first = work.first + view.experts
            for key in range(first, first + view.experts):
                named[count] = key
                count += 1
        return count

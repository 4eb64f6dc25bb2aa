"""KTransformers' fixed mapping: an expert is computed where its weights are."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from moesim.policies.assignment._placing import SpreadAssignment, flying
from moesim.policies.names import CPU, DEFERRED, PREFILL
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

Prefill = Literal["mapped", "gpu"]


class FixedMapping(SpreadAssignment):
    """Compute resident experts on their GPU and all others on the CPU, both at the same
    time; never fetch on demand.

    The cache decides what is resident: with a static one this is KTransformers'
    placement masks (``frequency``, ``uniform``, ``front-loading`` and ``random`` are
    ways to fill it); with any other it is the usual "cached on the GPU, uncached on the
    CPU".

    An expert resident on several GPUs goes to the one that would finish it first.

    Args:
        wait: experts in flight are awaited on their GPU instead of being computed on
            the CPU; off, as masks know nothing that is on its way.
        prefill: ``mapped`` treats a prompt like decode (kt-kernel's masks, the
            default); ``gpu`` fetches what is absent and computes nothing on the CPU, as
            KTransformers' rule for DeepSeek-V2-Lite has it, and HybriMoE's account.
        defer: experts of each token, those with the lowest gate scores, whose results
            join one layer later if the CPU computes them: expert deferral. One that is
            among the others of any token of the batch joins at once. In decode alone,
            as the paper has it, and in every layer but the last, as the code.

    Source: KTransformers (SOSP 2025), kt-kernel's GPU expert masks and its
    ``max_deferred_experts_per_token``; "fixed mapping" as HybriMoE (arXiv 2504.05897)
    calls it.
    """

    calibrates_planning: ClassVar[bool] = True

    def __init__(
        self, *, wait: bool = False, prefill: Prefill = "mapped", defer: int = 0
    ) -> None:
        expect_choice("prefill", prefill, Prefill)
        expect(defer >= 0, "defer", "a number >= 0", defer)
        self.waits = wait
        self.fetches_prompts = prefill == "gpu"
        self.deferred = defer
        self.defers = self.approximates = defer > 0

    def start(self, context: RunContext) -> None:
        """Count the experts of a token that are never deferred."""
        SpreadAssignment.start(self, context)
        self.kept = context.shape.top_k - self.deferred

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        if self.fetches_prompts and work.phase == PREFILL:
            self.allow_all(work, True)
        else:
            self.allow_residents(work)
            if self.waits:
                self._allow_arrivals(work)
        self.spread(work, lanes)
        if self.deferred:
            for i in range(work.active):
                if lanes[i] == CPU and work.ranks[i] >= self.kept:
                    lanes[i] = DEFERRED
        return 0

    def _allow_arrivals(self, work: Work) -> None:
        for gpu in range(work.gpus):
            for i in range(work.active):
                if flying(work, gpu, i):
                    self.allowed[gpu, i] = 1

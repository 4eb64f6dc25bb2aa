"""MoE-Lightning's offline search: one split per layer, for average workloads."""

from __future__ import annotations

from moesim.policies.assignment._gpu_choice import allowed_lanes
from moesim.policies.assignment._static_split import StaticSplit
from moesim.policies.base import (
    Assignment,
    AssignmentPolicy,
    LayerWork,
    MachineView,
    RunContext,
)
from moesim.policies.parameters import expect


class MoELightning(AssignmentPolicy):
    """Decide, before a layer's first step, which experts are streamed to the GPU for
    the whole run; the CPU computes the rest.

    The plan is that of `moesim.policies.assignment._static_split`: residents stay on
    the GPU (give it a static cache), and of the others as many are streamed as balance
    CPU, GPU and link. Prefill and decode have plans of their own. An expert that became
    resident since is computed where it is. The prefetch policy of the same name streams
    ahead.

    Departures: the paper also searches batch, micro-batch and where attention runs,
    which a trace replay has fixed.

    Args:
        tokens: tokens of the average step; none takes those of the first step of each
            phase.

    Source: MoE-Lightning (arXiv 2411.11217), reduced as in `reference/algorithms.md`
    §6.10.
    """

    def __init__(self, *, tokens: int | None = None) -> None:
        expect(tokens is None or tokens >= 1, "tokens", "a number >= 1 or none", tokens)
        self.tokens = tokens

    def start(self, context: RunContext) -> None:
        """Begin without plans."""
        self._split = StaticSplit(context, self.tokens)

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Follow the plan of this layer and phase, in ascending expert id."""
        plan = self._split.of(work.phase, work.layer, len(work.routing), view)
        resident = work.arrive_s == 0.0
        streamed = plan[work.experts]
        return Assignment(allowed_lanes(work, streamed | resident))

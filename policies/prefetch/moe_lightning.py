"""MoE-Lightning's stream of weights: the next layer's planned experts, ahead of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.assignment.moe_lightning import SplitPlan
from moesim.policies.base import PrefetchPolicy
from moesim.policies.parameters import expect
from moesim.policies.prefetch._ranked import is_present

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext


class MoELightning(PrefetchPolicy):
    """Stream what the plan of the assignment policy of this name puts on a GPU, one
    layer ahead.

    The plan is fixed, so no gate has to be waited for: attention, dense parts and
    products of a layer hide the copies for the next one. Experts that nobody turns out
    to use come as well, as far as the link has begun with them.

    Args:
        tokens, undivided: as of the assignment policy, whose plan this one repeats.

    Source: MoE-Lightning (arXiv 2411.11217), its pipeline of paged weights, without
    the order of pages within a layer; a step's first layer is fetched on demand.
    """

    def __init__(self, *, tokens: int | None = None, undivided: bool = False) -> None:
        expect(tokens is None or tokens >= 1, "tokens", "a number >= 1 or none", tokens)
        self.tokens = tokens
        self.undivided = undivided

    def start(self, context: RunContext) -> None:
        """Begin without plans."""
        self.split = SplitPlan(context, self.tokens, undivided=self.undivided)

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        """Name what is absent of the next layer's planned experts, in ascending id."""
        layer = work.layer + 1
        if layer == view.layers:
            return 0
        row = self.split.plan(work.phase, layer, work.rows, view)
        first = layer * view.experts
        count = 0
        for key in range(first, first + view.experts):
            if self.split.on_gpu[row, key] and not is_present(view, key):
                named[count] = key
                count += 1
        return count

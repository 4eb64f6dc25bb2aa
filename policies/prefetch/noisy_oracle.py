"""An oracle with random mistakes, to study predictors of any accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.base import Late, PrefetchPolicy
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext


class NoisyOracle(PrefetchPolicy):
    """Prefetch as many experts as will be active, each right with the stated accuracy.

    Every active expert is named with probability `accuracy`, else an inactive one drawn
    at random takes its place (where fewer are inactive than were missed, the rest is
    left out). Right and wrong names come in random order: a real predictor does not
    know its mistakes. Errors are independent of each other and from step to step, which
    those of a real predictor are not.

    Args:
        accuracy: expected share of the prediction that is right. The share of *copies*
            that get used is lower, as right ones are often present already.
        depth: layers ahead, nearest first, each as accurate.
        late: what becomes of copies that have not started when their layer comes:
            ``keep`` (DALI's reading, the default: a mistake is paid for in full),
            ``drop`` (SMoE's), or ``active``, which keeps those that turn out to be
            right.

    Source: ours, for "what if my predictor were 90 % right?", hence the default;
    and for SMoE's and ProMoE's predictors where a trace cannot hold their predictions.
    """

    oracle: ClassVar[bool] = True

    def __init__(
        self,
        *,
        accuracy: float = 0.9,
        depth: int = 1,
        late: Late = "drop",
    ) -> None:
        expect(0 <= accuracy <= 1, "accuracy", "0 to 1", accuracy)
        expect(depth >= 1, "depth", "a number >= 1", depth)
        expect_choice("late", late, Late)
        self.accuracy = accuracy
        self.depth = depth
        self.late = late

    def start(self, context: RunContext) -> None:
        """Seed the errors."""
        self._random = np.random.default_rng(context.seed)

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        """Predict the coming layers."""
        coming = np.asarray(view.coming)
        edges = view.coming_edges
        count = 0
        # Past the last layer nothing is drawn.
        for n in range(min(self.depth, len(edges) - 1)):
            active = coming[edges[n] : edges[n + 1]]
            first = work.first + (1 + n) * view.experts
            for expert in self._predict(active, view.experts).tolist():
                named[count] = first + expert
                count += 1
        return count

    def _predict(
        self,
        active: np.ndarray,
        experts: int,
    ) -> np.ndarray:
        """Distinct ids in random order, at most as many as are active."""
        is_right = self._random.random(len(active)) < self.accuracy
        right = active[is_right]
        inactive = np.delete(np.arange(experts), active)
        # Both permutations are always drawn, so that the stream of random numbers does
        # not depend on how many were right.
        missed = len(active) - len(right)
        wrong = self._random.permutation(inactive)[:missed]
        return self._random.permutation(np.concatenate((right, wrong)))

"""Random prefetch, the control of every predictor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import PrefetchPolicy
from moesim.policies.parameters import expect
from moesim.policies.prefetch._ranked import name_absent

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext


class RandomPrefetch(PrefetchPolicy):
    """Prefetch experts of the next layer drawn at random, each as likely as any other.

    Args:
        size: experts drawn; those that are present use up their rank.
        refill: draw until there are `size` absent ones.

    Source: DALI, section 6.3 ("random prefetch").
    """

    def __init__(self, *, size: int = 4, refill: bool = False) -> None:
        expect(size >= 0, "size", "a number >= 0", size)
        self.size = size
        self.refill = refill

    def start(self, context: RunContext) -> None:
        """Seed the generator."""
        self._random = np.random.default_rng(context.seed)

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        """Guess the next layer."""
        layer = work.layer + 1
        if layer >= view.layers:
            return 0
        # One permutation per layer step, whatever is present: two runs with one seed
        # guess the same, also where their caches differ.
        drawn = self._random.permutation(view.experts)
        return name_absent(view, layer, drawn.data, self.size, self.refill, named, 0)

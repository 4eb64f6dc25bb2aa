"""Guessing: what prefetching costs and brings when nothing is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.base import PrefetchPolicy
from moesim.policies.parameters import expect
from moesim.policies.prefetch._wishes import wishes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import ExpertKey, LayerWork, MachineView, RunContext


class RandomPrefetch(PrefetchPolicy):
    """Prefetch experts of the next layer drawn at random, all alike: the control of a
    predictor.

    One permutation is drawn per layer step whatever is present, so two runs with one
    seed guess the same.

    Args:
        size: experts drawn; those that are present use up their place.
        refill: draw until `size` absent ones are found.

    Source: DALI, section 6.3 ("random prefetch").
    """

    def __init__(self, *, size: int = 4, refill: bool = False) -> None:
        expect(size >= 0, "size", "a number >= 0", size)
        self.size = size
        self.refill = refill

    def start(self, context: RunContext) -> None:
        """Seed the generator."""
        self._random = np.random.default_rng(context.seed)

    def prefetch(self, work: LayerWork, view: MachineView) -> Sequence[ExpertKey]:
        """Guess the next layer."""
        if work.layer + 1 >= view.layers:
            return ()
        ranked = self._random.permutation(view.experts)
        return wishes(ranked, work.layer + 1, view, size=self.size, refill=self.refill)

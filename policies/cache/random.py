"""Random eviction, the control of every other rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import view_of
from moesim.policies.base import CachePolicy

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.run_context import RunContext


class Random(CachePolicy):
    """Evict an expert drawn at random, from the run's seed.

    Source: the usual control of cache studies.
    """

    def start(self, context: RunContext) -> None:
        # A generator of its own, so that its draws do not depend on other policies.
        self.random = np.random.default_rng(context.seed)

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        drawn = self.random.choice(candidates, len(incoming), replace=False)
        chosen[:] = view_of(drawn, np.int64)

"""Random eviction, the control of every other rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import CachePolicy

if TYPE_CHECKING:
    from moesim.policies.base import RunContext


class Random(CachePolicy):
    """Evict an expert drawn at random, from the run's seed.

    Source: the usual control of cache studies.
    """

    def start(self, context: RunContext) -> None:
        """Seed the draws."""
        # A generator of its own, so that its draws do not depend on other policies.
        self._random = np.random.default_rng(context.seed)

    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Draw as many candidates as experts come in, each at most once."""
        return self._random.choice(candidates, len(incoming), replace=False)

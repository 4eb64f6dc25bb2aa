"""Evict anybody."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from policies.base import CachePolicy

if TYPE_CHECKING:
    from policies.base import LayerWork, RunContext


class Random(CachePolicy):
    """Draw the victims without regard to anything, from the run's seed."""

    def start(self, context: RunContext) -> None:
        """Seed the draws."""
        self._random = random.Random(context.seed)

    def accessed(self, work: LayerWork) -> None:
        """Remember nothing."""

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Draw as many candidates as experts come in, each at most once."""
        places = self._random.sample(range(len(candidates)), len(incoming))
        return candidates[np.array(places, np.intp)]

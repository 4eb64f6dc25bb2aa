"""Caches that never take in a fetched expert, and swap on their own account instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.cache._no_admission import ClosedCache

if TYPE_CHECKING:
    from moesim.policies.base import MachineView, RunContext


class SwapCache(ClosedCache):
    """Knows what is inside; admits nothing on demand. Subclasses answer `initial` and
    `replacements`.

    `inside` bool [L, E]: entered and not left, copies in flight included.
    """

    def start(self, context: RunContext) -> None:
        """Begin empty."""
        self.inside = np.zeros((context.shape.layers, context.shape.experts), np.bool_)

    def admitted(self, keys: np.ndarray) -> None:
        """Note who is inside."""
        self.inside.reshape(-1)[keys] = True

    def evicted(self, keys: np.ndarray) -> None:
        """Note who is outside."""
        self.inside.reshape(-1)[keys] = False

    def settled(self, layer: int, view: MachineView) -> np.ndarray:
        """Experts of this cache that have arrived and may be swapped out: bool [E]."""
        usable = [view.resident(layer, gpu) for gpu in range(view.gpus)]
        return self.inside[layer] & np.any(usable, axis=0)

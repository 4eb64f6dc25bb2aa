"""Caches that never take in a fetched expert, and swap on their own account instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policies.base import CachePolicy

if TYPE_CHECKING:
    from policies.base import LayerWork, MachineView, RunContext


class SwapCache(CachePolicy):
    """Knows what is inside; admits nothing on demand. Subclasses answer `initial` and `replacements`.

    `inside` bool [L, E]: entered and not left, copies in flight included.
    """

    def start(self, context: RunContext) -> None:
        """Begin empty."""
        self.inside = np.zeros((context.shape.layers, context.shape.experts), np.bool_)

    def admits(self, work: LayerWork, incoming: np.ndarray) -> np.ndarray:
        """Refuse all: fetched and prefetched experts run from staging."""
        del work
        return np.zeros(len(incoming), dtype=np.bool_)

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Decline all."""
        del candidates
        return np.full(len(incoming), -1, np.int64)

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

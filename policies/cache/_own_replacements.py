"""Base of caches that admit no fetched expert and replace experts on their own
account.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.cache._no_admission import NoAdmissionCache

if TYPE_CHECKING:
    from moesim.policies.base import MachineView, RunContext


class OwnReplacementsCache(NoAdmissionCache):
    """Tracks its content; admits nothing on demand. Subclasses answer `initial` and
    `replacements`.

    Attributes:
        inside: bool [L, E]: entered and not left, copies in flight included.
    """

    def start(self, context: RunContext) -> None:
        """Begin empty."""
        shape = context.shape
        self.inside = np.zeros((shape.layers, shape.experts), np.bool_)

    def admitted(self, keys: np.ndarray) -> None:
        """Note what has entered."""
        # Flat keys index the flattened array, which shares its memory.
        self.inside.reshape(-1)[keys] = True

    def evicted(self, keys: np.ndarray) -> None:
        """Note what has left."""
        self.inside.reshape(-1)[keys] = False

    def settled(
        self,
        layer: int,
        view: MachineView,
    ) -> np.ndarray:
        """Experts of this cache that have arrived and may be swapped out: bool [E]."""
        resident = view.resident(layer)
        for gpu in range(1, view.gpus):
            resident = resident | view.resident(layer, gpu)
        # What is inside may still be in flight, and then it cannot leave yet.
        return self.inside[layer] & resident

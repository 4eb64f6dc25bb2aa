"""EdgeMoE's eviction: by frequency, and by how far off the expert's layer is."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.policies.cache.lfu import LFU, Variant
from moesim.policies.ranking import lowest_first

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.base import LayerWork, RunContext


class EdgeMoE(LFU):
    """Evict the expert with the fewest uses per layer of distance, ties to the lower
    key.

    Layers follow each other in a fixed order, so an expert of the next layer may be
    needed at once and one of the current layer only in the next forward pass. Uses are
    counted as `lfu` counts them; the distance is 1 for the next layer and the number of
    layers for the current one. Within one layer all distances are equal: with a cache
    per layer this is `lfu`.

    Args:
        variant, decay: as in `lfu`.

    Source: EdgeMoE (arXiv 2308.14352), whose buffer weighs both; the quotient is our
    reading, as we know no formula of it.
    """

    # No yardstick of analyses, which take the plain rules for that.
    reference: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, variant: Variant = "in-cache", decay: float = 1.0) -> None:
        super().__init__(variant=variant, decay=decay)

    def start(self, context: RunContext) -> None:
        """Begin before the first layer."""
        super().start(context)
        self._layers = context.shape.layers
        self._experts = context.shape.experts
        self._layer = -1

    def accessed(self, work: LayerWork) -> None:
        """Count as `lfu`, and note where the forward pass is."""
        super().accessed(work)
        self._layer = work.layer

    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Choose the lowest quotients of uses and distance."""
        layers = candidates // self._experts
        distance = (layers - self._layer - 1) % self._layers + 1
        worth = self.score[candidates] / distance
        return lowest_first(candidates, worth)[: len(incoming)]

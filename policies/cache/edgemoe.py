"""EdgeMoE's eviction: by frequency, and by how far off the expert's layer is."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.policies.arrays import zeros
from moesim.policies.cache.lfu import LFU, Variant
from moesim.policies.names import NONE
from moesim.policies.ranked_cache import lowest

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext


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
        LFU.__init__(self, variant=variant, decay=decay)

    def start(self, context: RunContext) -> None:
        """Begin before the first layer."""
        LFU.start(self, context)
        self.layer = NONE
        self.worth: Floats = zeros(self.layers * self.experts)

    def accessed(self, work: Work) -> None:
        LFU.accessed(self, work)
        self.layer = work.layer

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        for n in range(len(candidates)):
            key = candidates[n]
            ahead = key // self.experts - self.layer - 1
            self.worth[key] = self.score[key] / (ahead % self.layers + 1)
        lowest(candidates, self.worth, self.worth, chosen)

"""LFRU, least frequently recently used: frequency discounted by age."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from moesim.policies.arrays import zeros
from moesim.policies.cache.lfu import LFU
from moesim.policies.ranked_cache import lowest

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.run_context import RunContext

Variant = Literal["perfect", "in-cache"]


class LFRU(LFU):
    """Evict the expert with the fewest uses per layer step since its last use; ties to
    the lower id.

    The score is ``uses / (now - last use + 1)``. A use is one layer step in which the
    expert is active; entering is one for its age. Now counts the layer steps, of all
    layers, that this memory has seen.

    Args:
        variant: ``perfect`` counts the uses of the whole run; ``in-cache`` counts from
            1 on entering and forgets at eviction (tinyserve, vLLM #37190).

    Source: arXiv 2608.07911.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, *, variant: Variant = "perfect") -> None:
        # What breaks LFU's ties, the last use, divides here.
        LFU.__init__(self, variant=variant, tie="lru")

    def start(self, context: RunContext) -> None:
        LFU.start(self, context)
        self.rate: Floats = zeros(len(self.score))

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        # Rates fall with every layer step, so they are worked out when needed.
        for c in range(len(candidates)):
            key = candidates[c]
            self.rate[key] = self.score[key] / (self.now - self.tie[key] + 1.0)
        lowest(candidates, self.rate, self.rate, chosen)

"""The perfect prefetcher, limited by cache and link alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.policies.base import PrefetchPolicy
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work


class Clairvoyant(PrefetchPolicy):
    """Prefetch exactly the experts that the coming layers of this step will use.

    Nearest layer first, then ascending id. The bound on what a predictor can bring,
    given cache and link. All of them are named; those present are shielded by that.

    Args:
        depth: layers ahead; 1 is what the papers' predictors look at, and more can
            flood a slow link.

    Source: ours; what Belady is for caches.
    """

    oracle: ClassVar[bool] = True

    def __init__(self, *, depth: int = 1) -> None:
        expect(depth >= 1, "depth", "a number >= 1", depth)
        self.depth = depth

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        count = 0
        # Nearer layers first: the queue serves keys in the order they are named.
        for n in range(min(self.depth, len(view.coming_edges) - 1)):
            first = work.first + (1 + n) * view.experts
            for place in range(view.coming_edges[n], view.coming_edges[n + 1]):
                named[count] = first + view.coming[place]
                count += 1
        return count

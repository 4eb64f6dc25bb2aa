"""The perfect prefetcher, limited by cache and link alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.base import ExpertKey
from moesim.policies.parameters import expect
from moesim.policies.prefetch._future import FuturePrefetch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView


class Clairvoyant(FuturePrefetch):
    """Prefetch exactly the experts that the coming layers of this step will use.

    Nearest layer first, then ascending id. The bound on what a predictor can bring,
    given cache and link.

    Args:
        depth: layers ahead; 1 is what the papers' predictors look at, and more can
            flood a slow link.

    Source: ours; what Belady is for caches.
    """

    def __init__(self, *, depth: int = 1) -> None:
        expect(depth >= 1, "depth", "a number >= 1", depth)
        self.depth = depth

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Name them all; those present are shielded by being named."""
        keys: list[ExpertKey] = []
        for depth in range(1, self.depth + 1):
            # Nearer layers first: the queue serves keys in the order they are named.
            experts = self.coming(work, view, depth).tolist()
            keys += [ExpertKey(work.layer + depth, expert) for expert in experts]
        return keys

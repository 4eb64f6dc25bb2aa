"""The perfect prefetcher: never wrong, but no faster than the link."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.base import ExpertKey
from moesim.policies.parameters import expect
from moesim.policies.prefetch._foresight import Foresight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView


class Clairvoyant(Foresight):
    """Prefetch exactly the experts that the coming layers of this step will use.

    Nearest layer first, then ascending id. The bound on what a predictor can bring,
    given cache and link.

    Args:
        depth: layers ahead; 1 is what the papers' predictors look at, and more can
            flood a slow link.

    Source: ours; the prefetcher's Belady.
    """

    def __init__(self, *, depth: int = 1) -> None:
        expect(depth >= 1, "depth", "a number >= 1", depth)
        self.depth = depth

    def prefetch(self, work: LayerWork, view: MachineView) -> Sequence[ExpertKey]:
        """Name them all; those present are shielded by being named."""
        return [
            ExpertKey(work.layer + ahead, expert)
            for ahead in range(1, self.depth + 1)
            for expert in self.coming(work, view, ahead).tolist()
        ]

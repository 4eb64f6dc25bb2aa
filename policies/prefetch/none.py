"""No prefetch: experts move when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.base import PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import ExpertKey, LayerWork, MachineView


class NoPrefetch(PrefetchPolicy):
    """Want nothing.

    Source: what FlashMoE, Fiddler and the released Mixtral-Offloading do.
    """

    def prefetch(self, work: LayerWork, view: MachineView) -> Sequence[ExpertKey]:
        """Return an empty list."""
        del work, view
        return ()

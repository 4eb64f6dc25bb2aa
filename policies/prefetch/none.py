"""No prefetch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.policies.base import PrefetchPolicy

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work


class NoPrefetch(PrefetchPolicy):
    """Prefetch nothing: experts are copied when they are needed.

    Source: what FlashMoE, Fiddler and the released Mixtral-Offloading do.
    """

    prefetches: ClassVar[bool] = False

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        return 0

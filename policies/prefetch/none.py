"""No prefetch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.policies.base import PrefetchPolicy
from moesim.policies.kernels import PrefetchKernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import ExpertKey, LayerWork, MachineView


class NoPrefetch(PrefetchPolicy):
    """Prefetch nothing: experts are copied when they are needed.

    Source: what FlashMoE, Fiddler and the released Mixtral-Offloading do.
    """

    prefetches: ClassVar[bool] = False

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Return an empty sequence."""
        del work, view
        return ()

    def kernels(self) -> PrefetchKernels:
        """The same in compiled runs."""
        return PrefetchKernels()

"""First in, first out."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.policies.cache._kernels import fifo_admitted, lowest_victims, score_state
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.kernels import CacheKernels

if TYPE_CHECKING:
    from moesim.policies.base import RunContext


class FIFO(AdmittingCompiledCache):
    """Evict the expert that entered first; a hit changes nothing.

    Experts of one layer step enter in launch order. Equal to libCacheSim's FIFO on one
    request at a time.

    Source: textbook.
    """

    direction: ClassVar[float] = 1.0

    def bring(self, context: RunContext) -> CacheKernels:
        """Number entries, upwards for those that leave first."""
        return CacheKernels(
            score_state(context, numbers=[0.0, self.direction]),
            victims=lowest_victims,
            admitted=fifo_admitted,
        )

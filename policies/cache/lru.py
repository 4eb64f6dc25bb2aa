"""LRU, least recently used."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.policies.cache._kernels import (
    lowest_victims,
    lru_accessed,
    lru_admitted,
    score_state,
)
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.kernels import CacheKernels

if TYPE_CHECKING:
    from moesim.policies.base import RunContext


class LRU(AdmittingCompiledCache):
    """Evict the expert that was used least recently.

    Step-atomic: the active experts of a layer step are used at the same instant, so
    ties are real and go to the lower id. Entering counts as a use, so that a prefetched
    expert that is never used ages and leaves.

    Source: textbook. Mixtral-Offloading's and AdapMoE's cache.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def bring(self, context: RunContext) -> CacheKernels:
        """Begin the count of layer steps."""
        # A float, as it becomes a score; exact up to 2**53 layer steps.
        return CacheKernels(
            score_state(context, numbers=[0.0], integers=[context.shape.experts]),
            victims=lowest_victims,
            accessed=lru_accessed,
            admitted=lru_admitted,
        )

    @property
    def now(self) -> float:
        """Number of layer steps so far: the last one's stamp."""
        return float(self.brought.state.numbers[0])

"""LFRU, least frequently recently used: frequency discounted by age."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.policies.cache._kernels import count_accesses, stamp
from moesim.policies.cache._score_based import ScoreBasedCache
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext

Variant = Literal["perfect", "in-cache"]

# `count_accesses` with this factor never ages a count.
_NO_DECAY = 1.0


class LFRU(ScoreBasedCache):
    """Evict the expert with the fewest uses per layer step since its last use; ties to
    the lower id.

    The score is ``uses / (now - last use + 1)``. A use is one layer step in which the
    expert is active. Now counts the layer steps, of all layers, that this memory has
    seen (2608.07911).

    Args:
        variant: ``perfect`` counts the uses of the whole run (2608.07911; the best
            causal policy of peers §1.1); ``in-cache`` counts from 1 on entering and
            forgets at eviction (tinyserve, vLLM #37190).

    Source: peers §1.3.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, *, variant: Variant = "perfect") -> None:
        expect_choice("variant", variant, Variant)
        self.variant = variant

    def start(self, context: RunContext) -> None:
        """Begin all counts at 0; `perfect` counts every expert from the start."""
        super().start(context)
        keys = len(self.score)
        self._uses = np.zeros(keys)
        self._last = np.zeros(keys)
        self._counted = np.full(keys, self.variant == "perfect")
        self._now = 0.0

    def accessed(self, work: LayerWork) -> None:
        """Count and stamp the active experts."""
        self._now += 1.0
        first = work.layer * self.experts
        count_accesses(
            self._uses,
            self._counted,
            work.experts,
            first,
            self.experts,
            _NO_DECAY,
        )
        stamp(self._last, work.experts, first, self._now)

    def admitted(self, keys: np.ndarray) -> None:
        """Entering is a use in the cache, and fresh."""
        # A prefetched expert would otherwise be judged by its last use, long ago.
        self._last[keys] = self._now
        if self.variant == "in-cache":
            self._uses[keys] = 1.0
            self._counted[keys] = True

    def evicted(self, keys: np.ndarray) -> None:
        """Forget what leaves, unless all-time counts are kept."""
        if self.variant == "in-cache":
            self._counted[keys] = False

    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Choose the lowest frequency per age."""
        # Scores fall with every layer step, so they are worked out when needed.
        age = self._now - self._last[candidates] + 1.0
        self.score[candidates] = self._uses[candidates] / age
        return super().victims(incoming, candidates)

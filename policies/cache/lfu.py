"""LFU, least frequently used."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.cache._kernels import (
    count_accesses,
    lowest_victims,
    mark_keys,
    score_state,
    stamp,
    stamp_keys,
)
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.kernels import (
    ACCESSED,
    MOVED,
    CacheKernels,
    State,
    Work,
)
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

Variant = Literal["in-cache", "perfect"]
Tie = Literal["id", "fifo", "lru"]


@compiled(ACCESSED)
def count_uses(state: State, work: Work) -> None:
    """Count the active experts that are counted, after ageing their layer.

    Scores: counts, and where ties are not by id, the tie's numbers. Marks: what is
    counted. Numbers: layer steps, decay. Integers: E, whether entering starts a count,
    whether ties go to the least recently used.
    """
    width = state.integers[0]
    first = work.layer * width
    decay = state.numbers[1]
    count_accesses(state.scores[0], state.marks[0], work.experts, first, width, decay)
    state.numbers[0] += 1.0
    if state.integers[2]:
        stamp(state.scores[1], work.experts, first, state.numbers[0])


@compiled(MOVED)
def _admitted(state: State, keys: np.ndarray) -> None:
    """Begin to count what enters."""
    if state.integers[1]:
        stamp_keys(state.scores[0], keys, 1.0)
        mark_keys(state.marks[0], keys, 1)
    if len(state.scores) > 1:
        stamp_keys(state.scores[1], keys, state.numbers[0])


@compiled(MOVED)
def _evicted(state: State, keys: np.ndarray) -> None:
    """Forget what leaves, unless all-time counts are kept."""
    if state.integers[1]:
        mark_keys(state.marks[0], keys, 0)


class LFU(AdmittingCompiledCache):
    """Evict the expert with the fewest uses.

    A use is one layer step in which the expert is active, however many tokens it
    serves.

    Args:
        variant: ``in-cache`` counts while an expert is in the cache, from 1 on entering
            (by demand or prefetch), and forgets at eviction, as FlashMoE's baseline and
            libCacheSim do; ``perfect`` counts every use of the whole run, in the cache
            or not.
        decay: factor on a layer's counts before each of its steps; 1 never forgets.
        tie: between equal counts, ``id`` evicts the lower id (our rule, and CECAR's
            training code), ``fifo`` the first to enter (CECAR's runtime), ``lru`` the
            least recently used (libCacheSim).

    Source: textbook. The defaults are FlashMoE's baseline with our tie rule, and never
    forget because no paper gives a rate.
    """

    reference: ClassVar[tuple[str, ...]] = ("", "variant=perfect")

    def __init__(
        self,
        *,
        variant: Variant = "in-cache",
        decay: float = 1.0,
        tie: Tie = "id",
    ) -> None:
        expect_choice("variant", variant, Variant)
        expect_choice("tie", tie, Tie)
        expect(0.0 < decay <= 1.0, "decay", "0 < decay <= 1", decay)
        self.variant = variant
        self.decay = decay
        self.tie_rule = tie

    def bring(self, context: RunContext) -> CacheKernels:
        """Begin all counts at 0; `perfect` counts every expert from the start."""
        in_cache = self.variant == "in-cache"
        counted = np.full(context.shape.layers * context.shape.experts, not in_cache)
        return CacheKernels(
            score_state(
                context,
                # Without a row of its own, equal counts fall through to the lower id.
                rows=1 if self.tie_rule == "id" else 2,
                marks=[counted],
                numbers=[0.0, self.decay],
                integers=[context.shape.experts, in_cache, self.tie_rule == "lru"],
            ),
            victims=lowest_victims,
            accessed=count_uses,
            admitted=_admitted,
            evicted=_evicted,
        )

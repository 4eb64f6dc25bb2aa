"""LFRU, least frequently recently used: frequency discounted by age."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.policies.cache._kernels import (
    count_accesses,
    lowest_scores,
    mark_keys,
    score_state,
    stamp,
    stamp_keys,
)
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.kernels import (
    ACCESSED,
    KEYS,
    MOVED,
    SECONDS,
    VICTIMS,
    CacheKernels,
    State,
    Work,
)
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

Variant = Literal["perfect", "in-cache"]

# `count_accesses` with this factor never ages a count.
_NO_DECAY = 1.0

_SCORE = 0
_USES = 1
_LAST = 2
"""Rows of the scores of a compiled run."""


@compiled(nb.void(nb.float64[::1], SECONDS, SECONDS, KEYS, nb.float64))
def _uses_per_age(
    score: np.ndarray,
    uses: np.ndarray,
    last: np.ndarray,
    keys: np.ndarray,
    now: float,
) -> None:
    """Score `keys` by uses per layer step since the last use."""
    for key in keys:
        score[key] = uses[key] / (now - last[key] + 1.0)


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    state.numbers[0] += 1.0
    width = state.integers[0]
    first = work.layer * width
    count_accesses(
        state.scores[_USES], state.marks[0], work.experts, first, width, _NO_DECAY
    )
    stamp(state.scores[_LAST], work.experts, first, state.numbers[0])


@compiled(MOVED)
def _admitted(state: State, keys: np.ndarray) -> None:
    # A prefetched expert would otherwise be judged by its last use, long ago.
    stamp_keys(state.scores[_LAST], keys, state.numbers[0])
    if state.integers[1]:
        stamp_keys(state.scores[_USES], keys, 1.0)
        mark_keys(state.marks[0], keys, 1)


@compiled(MOVED)
def _evicted(state: State, keys: np.ndarray) -> None:
    if state.integers[1]:
        mark_keys(state.marks[0], keys, 0)


@compiled(VICTIMS)
def _victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    score = state.scores[_SCORE]
    uses = state.scores[_USES]
    last = state.scores[_LAST]
    # Scores fall with every layer step, so they are worked out when needed.
    _uses_per_age(score, uses, last, candidates, state.numbers[0])
    lowest_scores(candidates, score, score, chosen)


class LFRU(AdmittingCompiledCache):
    """Evict the expert with the fewest uses per layer step since its last use; ties to
    the lower id.

    The score is ``uses / (now - last use + 1)``. A use is one layer step in which the
    expert is active. Now counts the layer steps, of all layers, that this memory has
    seen.

    Args:
        variant: ``perfect`` counts the uses of the whole run; ``in-cache`` counts from
            1 on entering and forgets at eviction (tinyserve, vLLM #37190).

    Source: arXiv 2608.07911.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, *, variant: Variant = "perfect") -> None:
        expect_choice("variant", variant, Variant)
        self.variant = variant

    def bring(self, context: RunContext) -> CacheKernels:
        """Begin all counts at 0; `perfect` counts every expert from the start."""
        in_cache = self.variant == "in-cache"
        counted = np.full(context.shape.layers * context.shape.experts, not in_cache)
        return CacheKernels(
            score_state(
                context,
                rows=3,
                marks=[counted],
                numbers=[0.0],
                integers=[context.shape.experts, in_cache],
            ),
            victims=_victims,
            accessed=_accessed,
            admitted=_admitted,
            evicted=_evicted,
        )

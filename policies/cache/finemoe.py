"""FineMoE's cache: least frequently used, weighed with what searched maps expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.cache._kernels import (
    count_accesses,
    lowest_scores,
    mark_keys,
    score_state,
    stamp_keys,
)
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.kernels import (
    ACCESSED,
    MOVED,
    VICTIMS,
    CacheKernels,
    State,
    Work,
)
from moesim.policies.prefetch.finemoe import probabilities

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

# Rows of the state's scores by key. The numbers begin with probabilities by key.
_USES = 0
_WORTH = 1


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    """Count the active experts that are in the cache."""
    width = state.integers[0]
    first = work.layer * width
    count_accesses(state.scores[_USES], state.marks[0], work.experts, first, width, 1.0)


@compiled(MOVED)
def _admitted(state: State, keys: np.ndarray) -> None:
    """Begin to count what enters."""
    stamp_keys(state.scores[_USES], keys, 1.0)
    mark_keys(state.marks[0], keys, 1)


@compiled(MOVED)
def _evicted(state: State, keys: np.ndarray) -> None:
    """Count what leaves no longer."""
    mark_keys(state.marks[0], keys, 0)


@compiled(VICTIMS)
def _victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    """Choose the lowest products of uses and probability."""
    worth = state.scores[_WORTH]
    for key in candidates:
        worth[key] = state.scores[_USES, key] * state.numbers[key]
    lowest_scores(candidates, worth, worth, chosen)


class FineMoE(AdmittingCompiledCache):
    """Evict the expert with the lowest product of uses and probability, ties to the
    lower key.

    Uses are layer steps since the expert entered, from 1. The probability is that of
    the map which the prefetch policy of this name searched last for its layer; until
    then, and under another prefetch policy, all experts are equally likely.

    Departure: the released code forgets an expert's probability when it leaves, so that
    what is fetched on demand goes first.

    Source: FineMoE (EuroSys 2026, arXiv 2502.05370), section 4.5, eviction priority.
    """

    def bring(self, context: RunContext) -> CacheKernels:
        """Begin without uses."""
        made = score_state(
            context,
            rows=2,
            marks=[np.zeros(context.shape.layers * context.shape.experts)],
            integers=[context.shape.experts],
        )
        return CacheKernels(
            # Not copied: the prefetch policy writes into it.
            made._replace(numbers=probabilities(context)),
            victims=_victims,
            accessed=_accessed,
            admitted=_admitted,
            evicted=_evicted,
        )

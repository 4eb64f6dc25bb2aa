"""FineMoE's cache: least frequently used, weighed with what searched maps expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.cache._kernels import lowest_scores
from moesim.policies.cache.lfu import LFU
from moesim.policies.kernels import VICTIMS, CacheKernels, State
from moesim.policies.prefetch.finemoe import EXPECTED, expectations

if TYPE_CHECKING:
    from moesim.policies.base import RunContext


@compiled(VICTIMS)
def _victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    """Choose the lowest products of uses and probability."""
    worth = np.empty(len(candidates))
    for n in range(len(candidates)):
        key = candidates[n]
        worth[n] = state.scores[0, key] * state.numbers[EXPECTED + key]
    lowest_scores(np.arange(len(candidates)), worth, worth, chosen)
    for n in range(len(chosen)):
        chosen[n] = candidates[chosen[n]]


class FineMoE(LFU):
    """Evict the expert with the lowest product of uses and probability, ties to the
    lower key.

    Uses are layer steps since the expert entered, from 1. The probability is that of
    the map which the prefetch policy of this name searched last for its layer; until
    then, and under another prefetch policy, all experts are equally likely.

    Departure: the released code forgets an expert's probability when it leaves, so that
    what is fetched on demand goes first.

    Source: FineMoE (EuroSys 2026, arXiv 2502.05370), section 4.5, eviction priority.
    """

    reference = ()

    def __init__(self) -> None:
        super().__init__()

    def bring(self, context: RunContext) -> CacheKernels:
        """Begin without uses."""
        counting = super().bring(context)
        # Not copied: the prefetch policy writes into it.
        known = counting.state._replace(numbers=expectations(context))
        return counting._replace(state=known, victims=_victims)

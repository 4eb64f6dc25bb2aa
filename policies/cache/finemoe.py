"""FineMoE's cache: least frequently used, weighed with what searched maps expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.arrays import zeros
from moesim.policies.cache.lfu import LFU
from moesim.policies.prefetch.finemoe import expectations
from moesim.policies.ranked_cache import lowest

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.run_context import RunContext


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
        LFU.__init__(self)

    def start(self, context: RunContext) -> None:
        """Begin without uses."""
        LFU.start(self, context)
        self.expected: Floats = expectations(context)
        self.worth: Floats = zeros(self.layers * self.experts)

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        for n in range(len(candidates)):
            key = candidates[n]
            self.worth[key] = self.score[key] * self.expected[key]
        lowest(candidates, self.worth, self.worth, chosen)

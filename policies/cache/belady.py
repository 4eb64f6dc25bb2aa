"""Belady's clairvoyant cache: farthest next use first."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.arrays import view_of
from moesim.policies.base import PolicyError
from moesim.policies.ranked_cache import OutscoringCache, by_descending_score, lowest

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import Future, RunContext

NEVER_AGAIN = -np.inf


class Belady(OutscoringCache):
    """Evict the expert whose next use lies farthest in the future.

    A next use is one strictly after this layer step. "Never again" is farthest; ties go
    to the lower id. In global scope the time of a use is its step, then its layer. An
    expert's next use changes only when it is used, so the score (minus that time) is
    refreshed for the active experts alone, and prefetched ones need no bookkeeping.
    Where more experts come in than can enter, those that are needed soonest do.

    No policy has more hits where requests come one at a time and experts are of equal
    size. A layer step asks for several at once, and those that are resident are held
    while it runs: they cannot leave for one that is needed sooner. So where a step's
    active experts fill most of the cache (batches, prompts, small caches) this is no
    bound, and even LRU may have more hits; `belady-size` states one that always holds.

    Args:
        must_admit: False may decline an expert whose next use is later than that of
            everything it could replace; it then runs from staging. True is the textbook
            MIN, where each miss enters, as long as there is a resident that is not
            held.

    Source: Belady 1966 (MIN); layer steps as one request each are ours.
    """

    oracle: ClassVar[bool] = True

    def __init__(self, *, must_admit: bool = False) -> None:
        self.must_admit = must_admit

    def start(self, context: RunContext) -> None:
        """Look up the first use of every expert, and the next one of every access.

        Raises:
            PolicyError: the future is not available.
        """
        OutscoringCache.start(self, context)
        future = context.future
        if future is None:
            raise PolicyError(
                "cache policy 'belady' must see the future; only a replay of a whole"
                " trace has one"
            )
        self.never = future.never
        # A trace may end before the model's last layer.
        self.per_step = (len(future.edges) - 1) // max(1, self.never)
        self.edges: Ints = view_of(future.edges, np.int64)
        self.uses: Ints = view_of(future.experts, np.int32)
        self.following: Ints = view_of(future.following, np.int32)
        self.score = self.tie = view_of(self._first_uses(future), np.float64)

    def accessed(self, work: Work) -> None:
        # An expert's next use changes when it is used, and then alone.
        layer_step = work.step * self.per_step + work.layer
        if work.layer >= self.per_step or layer_step + 1 >= len(self.edges):
            return
        use = self.edges[layer_step]
        end = self.edges[layer_step + 1]
        # Host memory is told of some active experts only; both lists ascend.
        for i in range(work.active):
            expert = work.experts[i]
            while use < end and self.uses[use] < expert:
                use += 1
            if use == end:
                return
            time = NEVER_AGAIN
            if self.following[use] < self.never:
                time = -float(self.following[use] * self.per_step + work.layer)
            self.score[work.first + expert] = time

    def precedence(self, incoming: Ints) -> None:
        by_descending_score(incoming, self.score)

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        if self.must_admit:
            lowest(candidates, self.score, self.score, chosen)
        else:
            OutscoringCache.victims(self, incoming, candidates, chosen)

    def _first_uses(self, future: Future) -> np.ndarray:
        """Scores before the first layer step: float64 [L * E]."""
        every_expert = np.arange(self.experts, dtype=np.int32)
        layers = range(self.layers)
        # Strictly after step -1 is from the very first step on.
        uses = [future.next_uses(-1, layer, every_expert) for layer in layers]
        first_uses = np.array(uses)
        times = first_uses * self.per_step + np.array(layers)[:, None]
        is_used = first_uses < future.never
        return np.where(is_used, -times.astype(np.float64), NEVER_AGAIN).reshape(-1)

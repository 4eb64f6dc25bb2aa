"""Routing recall: what followed similar tokens stays, and what was used of late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.cache._own_replacements import ReplacingCache
from moesim.policies.cache.decayed_frequency import Fill
from moesim.policies.cache.static import Static
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranked_cache import outscored
from moesim.policies.routing_memory import RoutingMemory

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext


class Recall(ReplacingCache):
    """Keep the experts of a layer that the next token most likely uses.

    That is a weighted mean of two shares: how often tokens used the expert that came
    right after tokens with the same routing as this one so far (see
    `moesim.policies.routing_memory`), weighted as it has foretold uses, and how often
    it was used of late, by two decayed frequencies. What is fetched anyway, on demand
    or ahead of its layer, stays if it is worth more than the worst resident: that costs
    no copy. What is absent after a layer step, used or not, is copied behind the work
    if it is worth more by `margin`, the price of the link. A prompt counts as uses of
    its tokens, a pass that verifies drafts as so many tokens.

    Args:
        recall: share of its weight that what followed similar tokens has where a copy
            is to be bought by it.
        short: weight of the first of the two frequencies.
        short_half_life: of it, in tokens.
        long_half_life: of the other one, in forward passes; of a prompt, in tokens.
        margin: uses per pass, for each of its tokens, by which a newcomer must beat
            whom it replaces to be worth a copy of its own.
        history: tokens that are compared.
        planning_us, expert_ns: what this takes in a layer step: microseconds, and
            nanoseconds more for each expert of a layer.
        fill: the start, as in `static`.

    Source: ours; see docs/explanation/recall.md.
    """

    def __init__(
        self,
        *,
        recall: float = 0.35,
        short: float = 0.3,
        short_half_life: float = 4.0,
        long_half_life: float = 32.0,
        margin: float = 0.15,
        history: int = 256,
        planning_us: float = 1.7,
        expert_ns: float = 4.0,
        fill: Fill = "auto",
    ) -> None:
        expect(0 <= recall <= 1, "recall", "0 <= recall <= 1", recall)
        expect(0 <= short <= 1, "short", "0 <= short <= 1", short)
        expect(short_half_life > 0, "short_half_life", "> 0", short_half_life)
        expect(long_half_life > 0, "long_half_life", "> 0", long_half_life)
        expect(margin >= 0, "margin", ">= 0", margin)
        expect(history >= 1, "history", "a number >= 1", history)
        expect(planning_us >= 0, "planning_us", ">= 0", planning_us)
        expect(expert_ns >= 0, "expert_ns", ">= 0", expert_ns)
        expect_choice("fill", fill, Fill)
        self.recall = recall
        self.short = short
        self.half_lives = (short_half_life, long_half_life)
        self.margin = margin
        self.history = history
        self.taken_s = (1e-6 * planning_us, 1e-9 * expert_ns)
        self.fill: Fill = fill

    def start(self, context: RunContext) -> None:
        """Take the run's memory of routing, and begin without uses."""
        # Several GPUs have a memory of routing in common, and contents of their own.
        ReplacingCache.start(self, context)
        self.memory = RoutingMemory.of(context, self.history)
        self.memory.value_by(self.half_lives, self.recall, self.short, self.margin)
        # Copies of its own are bought by it.
        self.score = self.memory.copy_value
        self.worst: Ints = zeros(self.layers * self.experts, np.int64)
        self.order: Ints = zeros(self.layers * self.experts, np.int64)
        fixed_s, expert_s = self.taken_s
        self.own_planning_s = fixed_s + expert_s * self.experts
        self._initial_content = Static(fill=self.fill)
        self._initial_content.start(context)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Fill the cache as `fill` says: int64 flat keys, ascending."""
        return self._initial_content.initial(capacity_slots)

    def accessed(self, work: Work) -> None:
        self.memory.observe(work)

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        worth = self.memory.score
        outscored(incoming, candidates, worth, self.worst, self.order, chosen)

    def replacements(
        self, work: Work, states: Ints, outgoing: Ints, incoming: Ints
    ) -> int:
        margin = self.memory.margin
        return self.pair(work, states, outgoing, incoming, margin, True)

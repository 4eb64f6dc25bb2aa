"""MoE-Infinity's cache: a priority from layer, sequence and past visits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.arrays import filled, zeros
from moesim.policies.base import CachePolicy
from moesim.policies.names import NONE
from moesim.policies.parameters import expect_choice
from moesim.policies.ranked_cache import lowest

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

Topology = Literal["first", "released"]
Visits = Literal["in-cache", "perfect"]

# Added to each normalised factor, so that a zero in one does not hide the others
# (released code).
_FLOOR = 1e-6


class MoEInfinity(CachePolicy):
    """Evict the expert with the lowest product of topology decay, activation ratio of
    the sequence, and visit frequency.

    Each factor is scaled to sum to 1 over all experts and raised by 1e-6. The
    activation ratio is the expert's share of its layer's tokens since the sequences
    began; a layer that has none counts as uniform. Experts of the current layer, and
    prefetched ones that were not used yet, leave only when no other can; within either
    group the lowest product, then the lower id. Made for the global scope.

    Args:
        topology: ``first`` favours early layers, ``1 − l / L``: their experts are
            predicted latest; ``released`` is the code's rule, which takes the first
            half of the layers for an encoder. While the current layer lies in a half,
            that half's layers up to it count 1; otherwise the first half falls from 1
            and the second rises from 0.
        visits: ``in-cache`` counts layer steps since entering, from 1; ``perfect`` over
            the run.
        reset: whether the next batch begins new sequences; otherwise the whole run is
            one.

    Source: MoE-Infinity ``expert_priority_score.py`` and ``expert_cache.py``.
    """

    def __init__(
        self,
        *,
        topology: Topology = "first",
        visits: Visits = "in-cache",
        reset: bool = True,
    ) -> None:
        expect_choice("topology", topology, Topology)
        expect_choice("visits", visits, Visits)
        self.released = topology == "released"
        self.in_cache = visits == "in-cache"
        self.reset = reset

    def start(self, context: RunContext) -> None:
        """Begin without tokens or visits."""
        self.layers = context.shape.layers
        self.experts = context.shape.experts
        keys = self.layers * self.experts
        self.priority: Floats = zeros(keys)
        self.protected: Floats = zeros(keys)
        self.tokens: Floats = zeros(keys)
        self.layer_tokens: Floats = zeros(self.layers)
        self.visits: Floats = zeros(keys)
        self.all_visits = 0.0
        self.counted: Ints = filled(keys, not self.in_cache, np.int8)
        # Prefetched and not used yet; and used by the layer step under way.
        self.unused: Ints = zeros(keys, np.int8)
        self.active: Ints = zeros(keys, np.int8)
        self.layer = 0
        self.batch = NONE

    def accessed(self, work: Work) -> None:
        """Count tokens and visits of the active experts."""
        # Not by phase: a prompt may come in several passes.
        if self.reset and work.batch != self.batch:
            self._begin()
            self.batch = work.batch
        # Kept for `admitted`, which follows and is not told the layer step.
        first = self.layer * self.experts
        for key in range(first, first + self.experts):
            self.active[key] = 0
        self.layer = work.layer
        for i in range(work.active):
            key = work.first + work.experts[i]
            self.tokens[key] += work.tokens[i]
            self.layer_tokens[work.layer] += work.tokens[i]
            if self.counted[key]:
                self.visits[key] += 1.0
                self.all_visits += 1.0
            self.unused[key] = 0
            self.active[key] = 1

    def _begin(self) -> None:
        """Forget the tokens of the last sequences."""
        for key in range(len(self.tokens)):
            self.tokens[key] = 0.0
        for layer in range(self.layers):
            self.layer_tokens[layer] = 0.0

    def admitted(self, key: int) -> None:
        # What enters without being active was prefetched, and is protected until used.
        self.unused[key] = not self.active[key]
        if self.in_cache:
            self.all_visits += 1.0 - self.visits[key]
            self.visits[key] = 1.0
            self.counted[key] = 1

    def evicted(self, key: int) -> None:
        self.unused[key] = 0
        if self.in_cache:
            self.all_visits -= self.visits[key]
            self.visits[key] = 0.0
            self.counted[key] = 0

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        """Choose the lowest priorities, protected ones last."""
        self.rate(candidates)
        for n in range(len(candidates)):
            key = candidates[n]
            is_current = key // self.experts == self.layer
            self.protected[key] = 1.0 if self.unused[key] or is_current else 0.0
        lowest(candidates, self.protected, self.priority, chosen)

    def rate(self, keys: Ints) -> None:
        """Renew the `priority` of some experts: the product of each factor as a share
        of its sum.
        """
        decays = 0.0
        for layer in range(self.layers):
            decays += self.topology_decay(layer) * self.experts
        uniform = 1.0 / (self.layers * self.experts)
        for n in range(len(keys)):
            key = keys[n]
            layer = key // self.experts
            topology = uniform
            if decays > 0.0:
                topology = self.topology_decay(layer) / decays
            # A layer without tokens of these sequences counts as uniform. The shares of
            # each layer sum up to 1.
            ratio = 1.0 / self.experts
            if self.layer_tokens[layer] > 0.0:
                ratio = self.tokens[key] / self.layer_tokens[layer]
            visited = uniform
            if self.all_visits > 0.0:
                visited = self.visits[key] / self.all_visits
            product = (topology + _FLOOR) * (ratio / self.layers + _FLOOR)
            self.priority[key] = product * (visited + _FLOOR)

    def topology_decay(self, layer: int) -> float:
        """The topology's factor of a layer, 0 to 1."""
        if not self.released:
            return 1.0 - layer / self.layers
        half = max(1, self.layers // 2)
        in_first_half = layer < half
        # Up to the current layer its half counts 1.
        if in_first_half == (self.layer < half) and layer <= self.layer:
            return 1.0
        if in_first_half:
            return 1.0 - layer / half
        return (layer - half) / (half + 1)

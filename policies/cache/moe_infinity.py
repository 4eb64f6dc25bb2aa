"""MoE-Infinity's cache: a priority from layer, sequence and past visits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.cache._kernels import lowest_scores
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.kernels import (
    ACCESSED,
    MOVED,
    VICTIMS,
    CacheKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

Topology = Literal["first", "released"]
Visits = Literal["in-cache", "perfect"]

# Added to each normalised factor, so that a zero in one does not hide the others
# (released code).
_FLOOR = 1e-6


# Rows of the state's scores by key.
_TOKENS = 0
_VISITS = 1

# Rows of the state's marks by key: whose visits are counted, what was prefetched and
# not used yet, and what the layer step under way uses.
_COUNTED = 0
_UNUSED = 1
_ACTIVE = 2

# Places in the state's numbers: all visits, then the tokens of each layer.
_ALL_VISITS = 0
_LAYER_TOKENS = 1

# Places in the state's integers.
_EXPERTS = 0
_LAYERS = 1
_RELEASED = 2
_IN_CACHE = 3
_RESET = 4
_LAYER = 5
_BATCH = 6


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    """Count tokens and visits of the active experts."""
    # Not by phase: a prompt may come in several passes.
    if state.integers[_RESET] and work.batch != state.integers[_BATCH]:
        state.scores[_TOKENS, :] = 0.0
        state.numbers[_LAYER_TOKENS:] = 0.0
        state.integers[_BATCH] = work.batch
    width = state.integers[_EXPERTS]
    # Kept for `_admitted`, which follows and is not told the layer step.
    first = state.integers[_LAYER] * width
    for key in range(first, first + width):
        state.marks[_ACTIVE, key] = 0
    state.integers[_LAYER] = work.layer
    for i in range(len(work.experts)):
        key = work.layer * width + work.experts[i]
        state.scores[_TOKENS, key] += work.tokens[i]
        state.numbers[_LAYER_TOKENS + work.layer] += work.tokens[i]
        if state.marks[_COUNTED, key]:
            state.scores[_VISITS, key] += 1.0
            state.numbers[_ALL_VISITS] += 1.0
        state.marks[_UNUSED, key] = 0
        state.marks[_ACTIVE, key] = 1


@compiled(MOVED)
def _admitted(state: State, keys: np.ndarray) -> None:
    """Begin to count what enters."""
    for key in keys:
        # What enters without being active was prefetched, and is protected until used.
        state.marks[_UNUSED, key] = not state.marks[_ACTIVE, key]
        if state.integers[_IN_CACHE]:
            state.numbers[_ALL_VISITS] += 1.0 - state.scores[_VISITS, key]
            state.scores[_VISITS, key] = 1.0
            state.marks[_COUNTED, key] = 1


@compiled(MOVED)
def _evicted(state: State, keys: np.ndarray) -> None:
    """Forget what leaves, unless all-time visits are kept."""
    for key in keys:
        state.marks[_UNUSED, key] = 0
        if state.integers[_IN_CACHE]:
            state.numbers[_ALL_VISITS] -= state.scores[_VISITS, key]
            state.scores[_VISITS, key] = 0.0
            state.marks[_COUNTED, key] = 0


@compiled
def topology_decay(state: State, layer: int) -> float:
    """The topology's factor of a layer, 0 to 1."""
    layers = state.integers[_LAYERS]
    if not state.integers[_RELEASED]:
        return 1.0 - layer / layers
    half = max(1, layers // 2)
    current = state.integers[_LAYER]
    in_first_half = layer < half
    # Up to the current layer its half counts 1.
    if in_first_half == (current < half) and layer <= current:
        return 1.0
    return 1.0 - layer / half if in_first_half else (layer - half) / (half + 1)


@compiled
def priorities(state: State, keys: np.ndarray) -> np.ndarray:
    """The product for some experts, float64, each factor as a share of its sum."""
    width = state.integers[_EXPERTS]
    layers = state.integers[_LAYERS]
    decays = 0.0
    for layer in range(layers):
        decays += topology_decay(state, layer) * width
    visits = state.numbers[_ALL_VISITS]
    uniform = 1.0 / (layers * width)
    result = np.empty(len(keys))
    for n in range(len(keys)):
        key = keys[n]
        layer = key // width
        topology = topology_decay(state, layer) / decays if decays > 0.0 else uniform
        # A layer without tokens of these sequences counts as uniform. The shares of
        # each layer sum up to 1.
        tokens = state.numbers[_LAYER_TOKENS + layer]
        ratio = state.scores[_TOKENS, key] / tokens if tokens > 0.0 else 1.0 / width
        visited = state.scores[_VISITS, key] / visits if visits > 0.0 else uniform
        result[n] = (topology + _FLOOR) * (ratio / layers + _FLOOR)
        result[n] *= visited + _FLOOR
    return result


@compiled(VICTIMS)
def _victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    """Choose the lowest priorities, protected ones last."""
    priority = priorities(state, candidates)
    protected = np.empty(len(candidates))
    for n in range(len(candidates)):
        key = candidates[n]
        current = key // state.integers[_EXPERTS] == state.integers[_LAYER]
        protected[n] = 1.0 if state.marks[_UNUSED, key] or current else 0.0
    best = np.empty(len(chosen), np.int64)
    lowest_scores(np.arange(len(candidates)), protected, priority, best)
    for n in range(len(chosen)):
        chosen[n] = candidates[best[n]] if best[n] >= 0 else -1


class MoEInfinity(AdmittingCompiledCache):
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
        self.topology = topology
        self.visits = visits
        self.reset = reset

    def bring(self, context: RunContext) -> CacheKernels:
        """Begin without tokens or visits."""
        shape = context.shape
        keys = shape.layers * shape.experts
        in_cache = self.visits == "in-cache"
        scores = np.zeros((_VISITS + 1, keys))
        marks = np.zeros((_ACTIVE + 1, keys))
        marks[_COUNTED] = not in_cache
        rules = (self.topology == "released", in_cache, self.reset)
        return CacheKernels(
            state(
                scores=scores,
                marks=marks,
                numbers=np.zeros(1 + shape.layers),
                integers=[shape.experts, shape.layers, *rules, 0, -1],
            ),
            victims=_victims,
            accessed=_accessed,
            admitted=_admitted,
            evicted=_evicted,
        )

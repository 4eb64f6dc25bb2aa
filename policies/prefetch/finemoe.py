"""FineMoE's prefetch by the expert map of the most similar iteration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.compiled import CompiledPrefetch
from moesim.policies.kernels import (
    PREFETCH,
    KernelView,
    PrefetchKernels,
    State,
    Work,
)
from moesim.policies.parameters import expect
from moesim.policies.prefetch._kernels import is_present

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

_SMALLEST = 1e-30
"""Lengths below this count as 0, so that an empty map is like no other."""

# The state's scores have a column for each map that is kept. Rows are probabilities by
# key, then the squared length of each layer; then, up to this layer, the products with
# the map of the iteration under way, and the squared lengths.
_PRODUCTS = 0
_LENGTHS = 1
_ROWS = 2

# The numbers begin with two of the cache's; then come what searched maps say, by key,
# the map under way, and its squared length.
EXPECTED = 2

# Places in the state's integers.
_EXPERTS = 0
_LAYERS = 1
_TOP_K = 2
_DISTANCE = 3
_KEPT = 4


@compiled
def _observe(state: State, work: Work) -> None:
    """Compare the gate's probabilities with this layer of all maps."""
    experts = state.integers[_EXPERTS]
    layers = state.integers[_LAYERS]
    keys = experts * layers
    kept = state.integers[_KEPT]
    running = state.numbers[EXPECTED + keys :]
    products = state.scores[keys + layers + _PRODUCTS]
    lengths = state.scores[keys + layers + _LENGTHS]
    if work.layer == 0:
        running[:] = 0.0
        products[:] = 0.0
        lengths[:] = 0.0
    total = _SMALLEST
    for score in work.scores:
        total += score
    first = work.layer * experts
    for expert in range(len(work.scores)):
        share = work.scores[expert] / total
        running[first + expert] = share
        running[keys] += share * share
        known = state.scores[first + expert]
        for n in range(kept):
            products[n] += share * known[n]
    known = state.scores[keys + work.layer]
    for n in range(kept):
        lengths[n] += known[n]


@compiled
def _most_similar(state: State) -> tuple[int, float]:
    """The map with the highest cosine to the layers so far, ties to the older, and that
    cosine.
    """
    layers = state.integers[_LAYERS]
    keys = state.integers[_EXPERTS] * layers
    row = keys + layers
    square = state.numbers[EXPECTED + 2 * keys]
    best = 0
    most = -1.0
    for n in range(state.integers[_KEPT]):
        length = math.sqrt(state.scores[row + _LENGTHS, n] * square)
        cosine = state.scores[row + _PRODUCTS, n] / max(length, _SMALLEST)
        if cosine > most:
            best = n
            most = cosine
    return best, most


@compiled
def _keep(state: State, best: int) -> None:
    """Keep the map under way, behind the others or, where the store is full, in place
    of the one that it resembles most.
    """
    experts = state.integers[_EXPERTS]
    layers = state.integers[_LAYERS]
    keys = experts * layers
    place = best
    if state.integers[_KEPT] < state.scores.shape[1]:
        place = state.integers[_KEPT]
        state.integers[_KEPT] += 1
    state.scores[keys : keys + layers, place] = 0.0
    for key in range(keys):
        share = state.numbers[EXPECTED + keys + key]
        state.scores[key, place] = share
        state.scores[keys + key // experts, place] += share * share


@compiled(PREFETCH)
def _by_expert_map(
    state: State, work: Work, view: KernelView, named: np.ndarray
) -> int:
    """Name the likely experts of the layer at the prefetch distance, by the map that
    looks most like the iteration so far.
    """
    _observe(state, work)
    best, cosine = _most_similar(state)
    experts = state.integers[_EXPERTS]
    layers = state.integers[_LAYERS]
    if work.layer == layers - 1:
        _keep(state, best)
    layer = work.layer + state.integers[_DISTANCE]
    if layer >= layers or not state.integers[_KEPT]:
        return 0
    first = layer * experts
    unlikely = np.empty(experts)
    for expert in range(experts):
        share = state.scores[first + expert, best]
        state.numbers[EXPECTED + first + expert] = share
        unlikely[expert] = -share
    least = max(0.0, min(1.0 - cosine, 1.0))
    taken = 0.0
    count = 0
    for chosen in range(experts):
        if chosen >= state.integers[_TOP_K] and taken >= least:
            break
        # Few are taken, so none is sorted.
        expert = int(np.argmin(unlikely))
        taken -= unlikely[expert]
        unlikely[expert] = 1.0
        if not is_present(view.states, first + expert):
            named[count] = first + expert
            count += 1
    return count


def expectations(context: RunContext) -> np.ndarray:
    """The numbers that prefetch policy and cache of this name share: all experts are
    equally likely until a map was searched.
    """
    keys = context.shape.layers * context.shape.experts

    def uniform() -> np.ndarray:
        numbers = np.zeros(EXPECTED + 2 * keys + 1)
        # Uses never decay.
        numbers[1] = 1.0
        numbers[EXPECTED : EXPECTED + keys] = 1.0 / context.shape.experts
        return numbers

    return context.share("finemoe", uniform)


class FineMoE(CompiledPrefetch):
    """Prefetch what the most similar iteration of the past would use, so many layers
    ahead.

    An iteration's map holds the gate's probabilities of all layers. The cosine between
    the layers so far and the same layers of every map in the store finds one; its
    probabilities say what the layer at the prefetch distance wants: the likeliest
    experts, until they sum up to 1 less the cosine, and at least as many as a token
    has. A map that ends goes into the store, or, where that is full, into the place of
    the one that it resembles most.

    Departures: no trace holds the embeddings of tokens, by which the paper searches for
    the first `distance` layers; nothing is prefetched for them, and a full store
    compares trajectories alone. The paper keeps a map for each sequence of a batch, its
    code for each token of a prompt; here a forward pass has one, the mean of its
    tokens. The released code names all experts of all layers behind the distance. As
    the paper searches beside the inference, searching takes no time.

    Args:
        distance: layers ahead; the paper has 3 for Mixtral-8x7B, 4 for Phi-3.5-MoE and
            6 for Qwen1.5-MoE.
        capacity: maps kept. The store begins empty, as the paper's online serving.

    Source: FineMoE (EuroSys 2026, arXiv 2502.05370), sections 4.1 to 4.5, equations 5
    to 8; `finemoe/runtime/model_offload.py`.
    """

    needs = ("scores",)

    def __init__(self, *, distance: int = 3, capacity: int = 1000) -> None:
        expect(distance >= 1, "distance", "a number >= 1", distance)
        expect(capacity >= 1, "capacity", "a number >= 1", capacity)
        self.ahead = distance
        self.capacity = capacity

    def start(self, context: RunContext) -> None:
        """Open an empty store."""
        super().start(context)
        shape = context.shape
        # What is never touched costs no memory.
        rows = shape.layers * (shape.experts + 1) + _ROWS
        scores = np.zeros((rows, self.capacity))
        sizes = [shape.experts, shape.layers, shape.top_k, self.ahead, 0]
        none = np.zeros((0, 0), np.int64)
        store = State(scores, none, expectations(context), np.array(sizes, np.int64))
        self.brought = PrefetchKernels(_by_expert_map, store)

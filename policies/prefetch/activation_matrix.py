"""MoE-Infinity's prefetch by the most similar finished sequence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.base import PolicyError
from moesim.policies.compiled import CompiledPrefetch
from moesim.policies.kernels import (
    PREFETCH,
    KernelView,
    PrefetchKernels,
    State,
    Work,
)
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch._kernels import is_present
from moesim.policies.ranking import best_of

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

Mask = Literal["released", "prefix"]


_EVERY_LAYER = 1 << 30

_SMALLEST = 1e-30
"""Lengths below this count as 0, so that empty rows stay empty."""

# The state's scores have a column for each sequence that is kept. Rows are counts by
# key, then the lengths of each layer's counts, then their cosines with the running
# sequence's, then how often each was most similar, then room for similarities. The
# numbers are the running sequence's counts by key.

# Places in the state's integers.
_EXPERTS = 0
_LAYERS = 1
_PREFIX = 2
_ALL = 3
_SIZE = 4
_BATCH = 5
_KEPT = 6
_CALIBRATED = 7


@compiled
def _finish(state: State) -> None:
    """Store the running sequence, if it has begun, and start an empty one.

    A full store forgets the one that was most similar least often; calibrated ones
    stay.
    """
    experts = state.integers[_EXPERTS]
    layers = state.integers[_LAYERS]
    keys = experts * layers
    capacity = state.scores.shape[1]
    matches = state.scores[keys + 2 * layers]
    if state.numbers.max() > 0.0 and capacity > state.integers[_CALIBRATED]:
        n = state.integers[_KEPT]
        if n < capacity:
            state.integers[_KEPT] = n + 1
        else:
            n = state.integers[_CALIBRATED]
            for other in range(n, capacity):
                if matches[other] < matches[n]:
                    n = other
        for layer in range(layers):
            squares = 0.0
            for key in range(layer * experts, (layer + 1) * experts):
                count = state.numbers[key]
                state.scores[key, n] = count
                squares += count * count
            state.scores[keys + layer, n] = math.sqrt(squares)
        matches[n] = 1.0
    state.numbers[:] = 0.0
    state.scores[keys + layers : keys + 2 * layers, :] = 0.0


@compiled
def _observe(state: State, work: Work) -> None:
    """Count the tokens of a layer step into the running sequence, and renew that
    layer's cosines: no other has moved.
    """
    experts = state.integers[_EXPERTS]
    layers = state.integers[_LAYERS]
    kept = state.integers[_KEPT]
    first = work.layer * experts
    for i in range(len(work.experts)):
        state.numbers[first + work.experts[i]] += work.tokens[i]
    squares = 0.0
    for key in range(first, first + experts):
        squares += state.numbers[key] * state.numbers[key]
    length = max(math.sqrt(squares), _SMALLEST)
    lengths = state.scores[experts * layers + work.layer]
    cosines = state.scores[experts * layers + layers + work.layer]
    for n in range(kept):
        cosines[n] = 0.0
    for key in range(first, first + experts):
        share = state.numbers[key] / length
        if share == 0.0:
            continue
        counts = state.scores[key]
        for n in range(kept):
            cosines[n] += counts[n] * share
    for n in range(kept):
        cosines[n] /= max(lengths[n], _SMALLEST)


@compiled
def _most_similar(state: State, first: int, end: int) -> int:
    """The sequence whose counts in some layers look most like the running one's, ties
    to the older.
    """
    layers = state.integers[_LAYERS]
    kept = state.integers[_KEPT]
    row = state.integers[_EXPERTS] * layers + layers
    similarity = state.scores[row + layers + 1]
    for n in range(kept):
        similarity[n] = 0.0
    for layer in range(first, end):
        cosines = state.scores[row + layer]
        for n in range(kept):
            similarity[n] += cosines[n]
    best = 0
    for n in range(1, kept):
        if similarity[n] > similarity[best]:
            best = n
    state.scores[row + layers, best] += 1.0
    return best


@compiled(PREFETCH)
def _by_similar_sequence(
    state: State, work: Work, view: KernelView, named: np.ndarray
) -> int:
    """Count this layer step, look up the nearest sequence, name its best absent
    experts.
    """
    # Not by phase: a prompt may come in several passes.
    if work.batch != state.integers[_BATCH]:
        _finish(state)
        state.integers[_BATCH] = work.batch
    _observe(state, work)
    experts = state.integers[_EXPERTS]
    layers = state.integers[_LAYERS]
    first = work.layer + 1
    wants = state.integers[_ALL] != 0 or state.integers[_SIZE] > 0
    if first == layers or not state.integers[_KEPT] or not wants:
        return 0
    if state.integers[_PREFIX]:
        similar = _most_similar(state, 0, first)
    else:
        similar = _most_similar(state, first, layers)

    value = np.zeros((layers - first) * experts)
    for n in range(len(value)):
        key = first * experts + n
        depth = n // experts + 1
        # Present experts are not wanted again, whatever their value.
        if not is_present(view.states, key):
            value[n] = state.scores[key, similar] * (1.0 - depth / (layers + 1))
    if state.integers[_ALL]:
        order = np.argsort(-value)
    else:
        order = best_of(value, value > 0.0, state.integers[_SIZE])
    count = 0
    for n in order:
        if value[n] > 0.0:
            named[count] = first * experts + n
            count += 1
    return count


class ActivationMatrix(CompiledPrefetch):
    """Prefetch the experts of all coming layers by what the most similar finished
    sequence used there.

    Similar is the highest mean over layers of the cosine between rows of token counts.
    A coming layer j counts with ``1 - (j - l) / (L + 1)``. Absent experts that the
    similar sequence used are wanted by descending value, ties to the lower layer and
    id. A batch counts as one sequence, which ends when the next batch begins; of a
    single one only a calibrated store can predict anything.

    Args:
        mask: which layers are compared at layer l. The ``released`` code blanks the
            stored rows up to l, so that only coming layers count, by what earlier steps
            of the sequence did there (nothing in its first step: the oldest matrix then
            wins). ``prefix`` compares the layers up to l, as the paper describes.
        capacity: sequences kept; 1000 in the released code. Calibrated ones
            (``extras["activation_matrices"]``, see
            `moesim.policies.prefetch.activation_matrix`) are never forgotten.
        size: absent experts wanted per layer step; none for all, as the released code
            queues them. With a queue that is sorted anew at every layer its head gives
            the same copies in a fraction of the time (docs/measurements/systems.md).
        requeue: whether the queue is sorted anew at every layer, as the released code
            does; otherwise what was put in earlier goes first.

    Source: MoE-Infinity, `expert_tracer.py` and `expert_predictor.py`; our reference,
    section 6.9.
    """

    def __init__(
        self,
        *,
        mask: Mask = "released",
        capacity: int = 1000,
        size: int | None = 8,
        requeue: bool = True,
    ) -> None:
        expect_choice("mask", mask, Mask)
        expect(capacity >= 1, "capacity", "a number >= 1", capacity)
        expect(size is None or size >= 0, "size", "a number >= 0 or none", size)
        self.mask = mask
        self.capacity = capacity
        self.ahead = _EVERY_LAYER
        self.size = size
        self.requeue = requeue

    def start(self, context: RunContext) -> None:
        """Open the store.

        Raises:
            PolicyError: the calibrated matrices have another shape than the model.
        """
        layers = context.shape.layers
        experts = context.shape.experts
        none_known = np.zeros((0, layers, experts))
        super().start(context)
        known = context.extras.get("activation_matrices", none_known)
        known = np.asarray(known, np.float64)
        if known.ndim != 3 or known.shape[1:] != (layers, experts):
            raise PolicyError(
                "prefetch policy 'activation-matrix': calibration"
                f" 'activation_matrices': expected shape (N, {layers}, {experts}), got"
                f" {known.shape}"
            )
        known = known[: self.capacity]
        kept = len(known)
        keys = layers * experts
        scores = np.zeros((keys + 2 * layers + 2, self.capacity))
        scores[:keys, :kept] = known.reshape(kept, keys).T
        squares = (known**2).sum(axis=2)
        scores[keys : keys + layers, :kept] = np.sqrt(squares).T
        scores[-2, :] = 1.0
        rules = (self.mask == "prefix", self.size is None, self.size or 0)
        integers = [experts, layers, *rules, -1, kept, kept]
        running = np.zeros(keys)
        # Not copied: what is never touched costs no memory.
        store = State(
            scores, np.zeros((0, 0), np.int64), running, np.array(integers, np.int64)
        )
        self.brought = PrefetchKernels(_by_similar_sequence, store)

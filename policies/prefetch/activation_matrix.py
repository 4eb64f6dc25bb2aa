"""MoE-Infinity's prefetch by the most similar finished sequence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.arrays import filled, zeros
from moesim.policies.base import PolicyError, PrefetchPolicy
from moesim.policies.names import NONE
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch._ranked import is_present
from moesim.policies.ranking import best_of

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

Mask = Literal["released", "prefix"]

_SMALLEST = 1e-30
"""Lengths below this count as 0, so that empty rows stay empty."""


class ActivationMatrix(PrefetchPolicy):
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
        self.by_prefix = mask == "prefix"
        self.capacity = capacity
        self.names_all = size is None
        self.size = size or 0
        self.requeue = requeue

    def start(self, context: RunContext) -> None:
        """Open the store.

        Raises:
            PolicyError: the calibrated matrices have another shape than the model.
        """
        layers = self.layers = context.shape.layers
        experts = self.experts = context.shape.experts
        none_known = np.zeros((0, layers, experts))
        known = context.extras.get("activation_matrices", none_known)
        known = np.asarray(known, np.float64)
        if known.ndim != 3 or known.shape[1:] != (layers, experts):
            raise PolicyError(
                "prefetch policy 'activation-matrix': calibration"
                f" 'activation_matrices': expected shape (N, {layers}, {experts}), got"
                f" {known.shape}"
            )
        known = known[: self.capacity]
        keys = layers * experts
        self.batch = NONE
        self.kept = self.calibrated = len(known)
        # Sequences have a column each; what is never touched costs no memory.
        counts = np.zeros((keys, self.capacity))
        counts[:, : self.kept] = known.reshape(self.kept, keys).T
        lengths = np.zeros((layers, self.capacity))
        lengths[:, : self.kept] = np.sqrt((known**2).sum(axis=2)).T
        self.counts: Floats = counts.data
        self.lengths: Floats = lengths.data
        self.cosines: Floats = zeros((layers, self.capacity))
        self.similarity: Floats = zeros(self.capacity)
        # How often each was most similar.
        self.matches: Floats = filled(self.capacity, 1.0)
        self.running: Floats = zeros(keys)
        self.value: Floats = zeros(keys)
        self.wanted: Ints = zeros(keys, np.uint8)
        self.best: Ints = zeros(min(self.size, keys), np.int64)

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        """Count this layer step, look up the nearest sequence, name its best absent
        experts.
        """
        # Not by phase: a prompt may come in several passes.
        if work.batch != self.batch:
            self._finish()
            self.batch = work.batch
        self._observe(work)
        following = self.layers - 1 - work.layer
        wants = self.names_all or self.size > 0
        if not following or not self.kept or not wants:
            return 0
        if self.by_prefix:
            similar = self._most_similar(0, work.layer + 1)
        else:
            similar = self._most_similar(work.layer + 1, self.layers)
        first = work.first + self.experts
        places = following * self.experts
        for n in range(places):
            depth = n // self.experts + 1
            count = self.counts[first + n, similar]
            # Present experts are not wanted again, whatever their value.
            if count > 0.0 and is_present(view, first + n):
                count = 0.0
            self.value[n] = count * (1.0 - depth / (self.layers + 1))
            self.wanted[n] = self.value[n] > 0.0
        if self.names_all:
            return self._name_all(first, places, named)
        taken = best_of(self.value[:places], self.wanted[:places], self.best)
        for n in range(taken):
            named[n] = first + self.best[n]
        return taken

    def _name_all(self, first: int, places: int, named: Ints) -> int:
        """Thousands are sorted here, so by NumPy."""
        values = np.asarray(self.value)[:places]
        order = np.argsort(-values, kind="stable")[: np.count_nonzero(values > 0.0)]
        np.asarray(named)[: len(order)] = first + order
        return len(order)

    def _finish(self) -> None:
        """Store the running sequence, if it has begun, and start an empty one.

        A full store forgets the one that was most similar least often; calibrated ones
        stay.
        """
        most = 0.0
        for key in range(len(self.running)):
            most = max(most, self.running[key])
        if most > 0.0 and self.capacity > self.calibrated:
            self._store()
        for key in range(len(self.running)):
            self.running[key] = 0.0
        for layer in range(self.layers):
            for n in range(self.kept):
                self.cosines[layer, n] = 0.0

    def _store(self) -> None:
        place = self.kept
        if place < self.capacity:
            self.kept += 1
        else:
            place = self.calibrated
            for other in range(place, self.capacity):
                if self.matches[other] < self.matches[place]:
                    place = other
        for layer in range(self.layers):
            squares = 0.0
            for key in range(layer * self.experts, (layer + 1) * self.experts):
                count = self.running[key]
                self.counts[key, place] = count
                squares += count * count
            self.lengths[layer, place] = math.sqrt(squares)
        self.matches[place] = 1.0

    def _observe(self, work: Work) -> None:
        """Count the tokens of a layer step into the running sequence, and renew that
        layer's cosines: no other has moved.
        """
        layer = work.layer
        for i in range(work.active):
            self.running[work.first + work.experts[i]] += work.tokens[i]
        squares = 0.0
        for key in range(work.first, work.first + self.experts):
            squares += self.running[key] * self.running[key]
        length = max(math.sqrt(squares), _SMALLEST)
        for n in range(self.kept):
            self.cosines[layer, n] = 0.0
        for key in range(work.first, work.first + self.experts):
            share = self.running[key] / length
            if share == 0.0:
                continue
            for n in range(self.kept):
                self.cosines[layer, n] += self.counts[key, n] * share
        for n in range(self.kept):
            self.cosines[layer, n] /= max(self.lengths[layer, n], _SMALLEST)

    def _most_similar(self, first: int, end: int) -> int:
        """The sequence whose counts in some layers look most like the running one's,
        ties to the older.
        """
        for n in range(self.kept):
            self.similarity[n] = 0.0
        for layer in range(first, end):
            for n in range(self.kept):
                self.similarity[n] += self.cosines[layer, n]
        best = 0
        for n in range(1, self.kept):
            if self.similarity[n] > self.similarity[best]:
                best = n
        self.matches[best] += 1.0
        return best

"""MoE-Infinity's prefetch by the most similar finished sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import ExpertKey, PolicyError, PrefetchPolicy
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import highest_first, present

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView, RunContext


Mask = Literal["released", "prefix"]


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
        self.mask = mask
        self.capacity = capacity
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
        known = context.extras.get("activation_matrices", none_known)
        known = np.asarray(known, np.float64)
        if known.ndim != 3 or known.shape[1:] != (layers, experts):
            raise PolicyError(
                "prefetch policy 'activation-matrix': calibration"
                f" 'activation_matrices': expected shape (N, {layers}, {experts}), got"
                f" {known.shape}"
            )
        self._store = ActivationStore(known, self.capacity)
        self._batch: int | None = None

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Count this layer step, look up the nearest sequence, name its best absent
        experts.
        """
        # Not by phase: a prompt may come in several passes.
        if work.batch != self._batch:
            self._store.finish()
            self._batch = work.batch
        self._store.observe(work.layer, work.experts, work.tokens)

        first = work.layer + 1
        if first >= view.layers or not len(self._store) or self.size == 0:
            return ()

        compared = slice(first, None)
        if self.mask == "prefix":
            compared = slice(first)
        depth = np.arange(1, view.layers - work.layer)
        decay = 1.0 - depth / (view.layers + 1)
        # A new array: the store's own rows stay as they are.
        similar = self._store.most_similar(compared)
        value = similar[first:] * decay[:, None]
        # Present experts are not wanted again, whatever their value.
        for j, row in enumerate(value):
            row[present(view, first + j)] = 0.0

        flat = value.reshape(-1)
        size = int(np.count_nonzero(flat))
        if self.size is not None:
            size = min(self.size, size)
        if not size:
            return ()
        # Only what reaches the size-th largest value is sorted, not all layers.
        least = np.partition(flat, -size)[-size]
        among = np.flatnonzero(flat >= least)
        best = highest_first(among, flat[among])[:size]
        return [
            ExpertKey(first + key // view.experts, key % view.experts)
            for key in best.tolist()
        ]


# Lengths below this count as 0, so that empty rows stay empty.
_SMALLEST = 1e-30


class ActivationStore:
    """Keeps the matrices of finished sequences and compares the running one with all of
    them, layer by layer.

    Cosines change only for the layer that was just observed, so each layer step costs
    one product with [N, E]. A full store forgets the matrix that was most similar least
    often; calibrated ones stay.

    Args:
        known: float64 [N, L, E] calibrated matrices, N may be 0.
        capacity: matrices kept in all.

    Attributes:
        current: float64 [L, E], the running sequence.
    """

    def __init__(
        self,
        known: np.ndarray,
        capacity: int,
    ) -> None:
        known = known[:capacity]
        self._capacity = capacity
        self._calibrated = len(known)
        self._counts = known.astype(np.float32)
        self._unit = _rows_to_unit(self._counts)
        self._matches = np.ones(len(known))
        self.current = np.zeros(known.shape[1:])
        self._cosine = np.zeros(known.shape[:2])

    def __len__(self) -> int:
        """How many finished sequences are kept."""
        return len(self._counts)

    def observe(
        self,
        layer: int,
        experts: np.ndarray,
        tokens: np.ndarray,
    ) -> None:
        """Count the tokens of a layer step into the running sequence."""
        self.current[layer, experts] += tokens
        row = self.current[layer]
        length = float(np.linalg.norm(row))
        unit = row / max(length, _SMALLEST)
        # Only this layer's cosines have moved.
        self._cosine[:, layer] = self._unit[:, layer] @ unit

    def most_similar(self, layers: slice) -> np.ndarray:
        """The finished matrix whose rows of `layers` look most like the running one's,
        ties to the older: [L, E].
        """
        similarity = self._cosine[:, layers].sum(axis=1)
        best = int(similarity.argmax())
        self._matches[best] += 1
        return self._counts[best]

    def finish(self) -> None:
        """Store the running sequence, if it has begun, and start an empty one."""
        if self.current.any() and self._capacity > self._calibrated:
            counts = self.current[None].astype(np.float32)
            unit = _rows_to_unit(counts)
            if len(self) < self._capacity:
                self._counts = np.concatenate((self._counts, counts))
                self._unit = np.concatenate((self._unit, unit))
                self._matches = np.append(self._matches, 1.0)
            else:
                # Calibrated matrices stand in front and are never replaced.
                learned = self._matches[self._calibrated :]
                index = self._calibrated + int(learned.argmin())
                self._counts[index] = counts[0]
                self._unit[index] = unit[0]
                self._matches[index] = 1.0
        layers = len(self.current)
        self.current = np.zeros_like(self.current)
        self._cosine = np.zeros((len(self), layers))


def _rows_to_unit(matrices: np.ndarray) -> np.ndarray:
    """Rows of length 1; empty rows stay empty. [N, L, E]."""
    length = np.linalg.norm(matrices, axis=2, keepdims=True)
    return matrices / np.maximum(length, _SMALLEST)

"""MoE-Infinity's prefetch by the most similar finished sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import ExpertKey, PolicyError, PrefetchPolicy
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.planner.resident_mask import present
from moesim.policies.prefetch._activation_store import ActivationStore
from moesim.policies.ranking import highest_first
from moesim.traces.format.schema import Phase

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
    id. A prefill of the first layer begins a new sequence (a batch is one sequence); a
    trace without prefill is one endless sequence, of which only a calibrated store can
    predict anything.

    Args:
        mask: which layers are compared at layer l. The ``released`` code blanks the
            stored rows up to l, so that only coming layers count, by what earlier steps
            of the sequence did there (nothing in its first step: the oldest matrix then
            wins). ``prefix`` compares the layers up to l, as the paper describes.
        capacity: sequences kept; 1000 in the released code. Calibrated ones
            (``extras["activation_matrices"]``, see
            `moesim.policies.prefetch._activation_store`) are never forgotten.
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

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Count this layer step, look up the nearest sequence, name its best absent
        experts.
        """
        if work.layer == 0 and work.phase == Phase.PREFILL:
            self._store.finish()
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

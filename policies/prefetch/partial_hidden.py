"""SMoE's online prefetch by the next gate's scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from moesim.policies.base import PrefetchPolicy
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch._absent_experts import absent_experts
from moesim.policies.prefetch._kernels import predicted_workload
from moesim.policies.ranking import ranked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import ExpertKey, LayerWork, MachineView

Merge = Literal["max", "sum"]


class PartialHidden(PrefetchPolicy):
    """Prefetch every expert in some token's predicted top k, best score first; drop
    what has not started in time.

    SMoE runs the next layer's attention and gate on the hidden state that the resident
    experts have produced so far. That state depends on residency, so no trace holds it:
    ``pred1_raw``, the next gate on this layer's input, stands in, and the second run of
    attention and gate is not charged. For a trace without predictions take
    ``noisy-oracle:accuracy=0.95,late=drop``, an oracle with SMoE's stated accuracy (95
    % of active experts).

    Args:
        merge: a batch's scores are merged by ``max`` (our reading; the paper has one
            token) or by ``sum`` over tokens.
        size: at most so many ranked experts, present ones included; none for all
            predicted.

    Source: SMoE, section on online prefetching; our reference, section 3.2.
    """

    needs = ("pred1_raw",)
    late = "drop"

    def __init__(self, *, merge: Merge = "max", size: int | None = None) -> None:
        expect_choice("merge", merge, Merge)
        expect(size is None or size >= 0, "size", "a number >= 0 or none", size)
        self.merge = merge
        self.size = size

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Queue the next layer's predicted experts, best first."""
        layer = work.layer + 1
        if layer >= view.layers:
            return ()

        scores = work.predicted["pred1_raw"].astype(np.float32)
        predicted = predicted_workload(scores, work.routing.shape[1]) > 0
        if self.merge == "max":
            merged = scores.max(axis=0)
        else:
            merged = scores.sum(axis=0, dtype=np.float64)

        # Experts that no token is predicted to choose sort last, and are cut off.
        count = np.count_nonzero(predicted)
        order = ranked(merged, among=predicted)[:count]
        return absent_experts(
            order,
            layer,
            view,
            size=len(order) if self.size is None else self.size,
            refill=False,
        )

"""SMoE's online prefetch by the next gate's scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import Evaluations, ExpertKey, PrefetchPolicy
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch._kernels import absent_experts
from moesim.policies.ranking import ranked
from moesim.traces.format.schema import Phase
from moesim.traces.predictions import predicted_workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView

Merge = Literal["max", "sum"]
Prefill = Literal["layer", "predicted"]


class PartialHidden(PrefetchPolicy):
    """Prefetch each token's predicted top k in decode, best score first, and the whole
    next layer in prefill; drop what has not started in time.

    SMoE runs the next layer's attention, gate and shared experts on the hidden state
    that the resident experts have produced so far; that second run is charged, behind
    the residents. The state depends on residency, so no trace holds it: ``pred1_raw``,
    the next gate on this layer's input, stands in. For a trace without predictions take
    ``noisy-oracle:accuracy=0.95,late=drop``, an oracle with SMoE's stated accuracy (95
    % of active experts).

    A whole layer is named with its residents, so that none of them leaves for the
    others; these wait in staging, which should hold a layer.

    Args:
        prefill: ``layer`` names all experts of the next layer in a prefill, as its
            pipeline preloads it; ``predicted`` treats prefill like decode.
        merge: a batch's scores are merged by ``max`` (our reading; the paper has one
            token) or by ``sum`` over tokens.
        size: at most so many ranked experts, present ones included; none for all
            predicted.

    Source: SMoE, sections on online prefetching and on prefill; our reference, sections
    3.2 and 3.6.
    """

    needs = ("pred1_raw",)
    late = "drop"

    def __init__(
        self,
        *,
        merge: Merge = "max",
        size: int | None = None,
        prefill: Prefill = "layer",
    ) -> None:
        expect_choice("merge", merge, Merge)
        expect_choice("prefill", prefill, Prefill)
        expect(size is None or size >= 0, "size", "a number >= 0 or none", size)
        self.merge = merge
        self.size = size
        self.prefill = prefill

    def evaluations(self, following: int, phase: Phase) -> Evaluations:
        """The next layer's dense part, where it is predicted."""
        del following
        return Evaluations(dense_parts=int(not self._preloads(phase)))

    def _preloads(self, phase: Phase) -> bool:
        return phase == Phase.PREFILL and self.prefill == "layer"

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Queue the next layer's predicted experts, best first."""
        layer = work.layer + 1
        if layer >= view.layers:
            return ()
        if self._preloads(work.phase):
            return [ExpertKey(layer, expert) for expert in range(view.experts)]

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

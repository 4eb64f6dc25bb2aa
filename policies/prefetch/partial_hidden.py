"""SMoE's online prefetch by the next gate's scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.base import PrefetchPolicy
from moesim.policies.names import PREFILL
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch._ranked import name_absent
from moesim.policies.ranking import best_of
from moesim.policies.run_context import Evaluations

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

Merge = Literal["max", "sum"]
Prefill = Literal["layer", "predicted"]

_NO_LIMIT = 1 << 62


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
    reads_tokens = True
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
        self.size = _NO_LIMIT if size is None else size
        self.by_maximum = merge == "max"
        self.preloads = prefill == "layer"

    def start(self, context: RunContext) -> None:
        """Make room for a ranking."""
        self.merged: Floats = zeros(context.shape.experts)
        self.wanted: Ints = zeros(context.shape.experts, np.uint8)
        self.ranked: Ints = zeros(context.shape.experts, np.int64)

    def evaluations(self, following: int, phase: int) -> Evaluations:
        """The next layer's dense part, where it is predicted."""
        del following
        return Evaluations(dense_parts=int(not (self.preloads and phase == PREFILL)))

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        """Queue the next layer's predicted experts, best first."""
        layer = work.layer + 1
        if layer == view.layers:
            return 0
        if self.preloads and work.phase == PREFILL:
            for expert in range(view.experts):
                named[expert] = layer * view.experts + expert
            return view.experts
        for expert in range(view.experts):
            self.merged[expert] = self._merged(view, expert)
            # Experts that no token is predicted to choose are not wanted.
            self.wanted[expert] = view.workload[0, expert] > 0
        ranked = self.ranked[: best_of(self.merged, self.wanted, self.ranked)]
        return name_absent(view, layer, ranked, self.size, False, named, 0)

    def _merged(self, view: MachineView, expert: int) -> float:
        """One score of all tokens for an expert."""
        merged = 0.0
        for t in range(len(view.predicted)):
            score = view.predicted[t, expert]
            if not self.by_maximum:
                merged += score
            elif t == 0 or score > merged:
                merged = score
        return merged

"""SMoE's online prefetch by the next gate's scores."""

from __future__ import annotations

from typing import Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.base import Evaluations
from moesim.policies.compiled import CompiledPrefetch
from moesim.policies.kernels import (
    PREFETCH,
    KernelView,
    PrefetchKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch._kernels import name_absent
from moesim.policies.ranking import best_of
from moesim.traces.format.schema import Phase

Merge = Literal["max", "sum"]
Prefill = Literal["layer", "predicted"]


_PREFILL = int(Phase.PREFILL)
_NO_LIMIT = 1 << 62


@compiled(PREFETCH)
def _by_next_gate(state: State, work: Work, view: KernelView, named: np.ndarray) -> int:
    """Queue the next layer's predicted experts, best first. The state's integers: most
    ranked experts, whether scores are merged by their maximum, and whether a prefill
    takes the whole layer.
    """
    experts = view.workload.shape[1]
    layer = work.layer + 1
    if layer * experts == view.states.shape[1]:
        return 0
    if state.integers[2] and work.phase == _PREFILL:
        for expert in range(experts):
            named[expert] = layer * experts + expert
        return experts
    merged = np.zeros(experts)
    for expert in range(experts):
        for t in range(len(view.predicted)):
            score = view.predicted[t, expert]
            if state.integers[1]:
                merged[expert] = score if t == 0 else max(merged[expert], score)
            else:
                merged[expert] += score
    # Experts that no token is predicted to choose are not wanted.
    predicted = view.workload[0] > 0
    order = best_of(merged, predicted, experts)
    return name_absent(
        order, layer, experts, view.states, state.integers[0], False, named, 0
    )


class PartialHidden(CompiledPrefetch):
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
        self.prefill = prefill
        most = _NO_LIMIT if size is None else size
        rules = (most, merge == "max", prefill == "layer")
        self.brought = PrefetchKernels(_by_next_gate, state(integers=rules))

    def evaluations(self, following: int, phase: Phase) -> Evaluations:
        """The next layer's dense part, where it is predicted."""
        del following
        return Evaluations(dense_parts=int(not self._preloads(phase)))

    def _preloads(self, phase: Phase) -> bool:
        return phase == Phase.PREFILL and self.prefill == "layer"

"""Fate's prefetch by the next layer's gate, as much as the link moves in a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

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
from moesim.policies.prefetch._kernels import name_absent, ranked_experts
from moesim.policies.ranking import best_of
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

_DECODE = int(Phase.DECODE)


@compiled
def _copies_of_a_layer(work: Work, view: KernelView, most: int) -> int:
    """Copies that the link makes while a layer lasts whose experts are all there, up to
    so many.
    """
    # Where plans are made without a clock, the last layer may end in the future.
    seconds = max(0.0, view.gap_s)
    for i in range(len(work.experts)):
        seconds += work.gpu_s[0, i]
    copy_s = view.copy_s[work.layer + 1]
    # Copies may take no time at all.
    return most if seconds >= most * copy_s else int(seconds / copy_s)


@compiled(PREFETCH)
def _by_next_gate(state: State, work: Work, view: KernelView, named: np.ndarray) -> int:
    """Name the next layer's experts by how many tokens want them, then by score. The
    state's integers: E, L, K.
    """
    experts = state.integers[0]
    if work.layer + 1 == state.integers[1]:
        return 0
    wanted = state.integers[2]
    if work.phase == _DECODE:
        wanted = _copies_of_a_layer(work, view, experts)
    tokens = np.zeros(experts)
    scores = np.zeros(experts)
    every = np.ones(experts, np.bool_)
    for t in range(len(view.predicted)):
        for expert in best_of(view.predicted[t], every, wanted):
            tokens[expert] += 1.0
            scores[expert] += view.predicted[t, expert]
    return name_absent(
        ranked_experts(tokens, scores),
        work.layer + 1,
        experts,
        view.states,
        experts,
        False,
        named,
        0,
    )


class Fate(CompiledPrefetch):
    """Prefetch what the next layer's gate prefers for this layer's gate input, as many
    as the link can copy in a layer.

    So many experts of each token in decode; in prefill as many as a token has. Experts
    that more tokens want come first, then those of higher score; residents among them
    are not replaced by others.

    A layer is taken to last as long as its dense part, as last seen, and its active
    experts on the GPU. The released code measures both once, for one token and a whole
    layer.

    Departures: the paper evaluates the gate on the CPU, its code on the GPU, where it
    is charged. Of a prompt's experts that few tokens want the source copies two bits
    instead of four; a trace's experts have one size. What is prefetched enters the
    cache when it lands, there when it is used.

    Source: Fate (arXiv 2502.12224), cross-layer expert prefetch;
    `models/Qwen/modeling_qwen_moe.py` and `utils/prefetch_k.py` of FFFzy/Fate_open.
    """

    needs = ("pred1_raw",)
    reads_tokens = True
    weighs_costs: ClassVar[bool] = True
    # There is no way to take a copy back.
    late = "keep"

    def start(self, context: RunContext) -> None:
        """Learn the sizes."""
        super().start(context)
        shape = context.shape
        sizes = (shape.experts, shape.layers, shape.top_k)
        self.brought = PrefetchKernels(_by_next_gate, state(integers=sizes))

    def evaluations(self, following: int, phase: Phase) -> Evaluations:
        """The next layer's gate."""
        del following, phase
        return Evaluations(gates=1)

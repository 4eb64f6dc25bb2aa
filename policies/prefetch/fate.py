"""Fate's prefetch by the next layer's gate, as much as the link moves in a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import filled, zeros
from moesim.policies.base import PrefetchPolicy
from moesim.policies.names import DECODE
from moesim.policies.prefetch._ranked import name_absent, sort_wanted
from moesim.policies.ranking import best_of
from moesim.policies.run_context import Evaluations

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext


class Fate(PrefetchPolicy):
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
    # There is no way to take a copy back.
    late = "keep"

    def start(self, context: RunContext) -> None:
        """Make room for a ranking."""
        experts = context.shape.experts
        self.top_k = context.shape.top_k
        self.predicted: Floats = zeros(experts)
        self.every: Ints = filled(experts, 1, np.uint8)
        self.best: Ints = zeros(experts, np.int64)
        self.tokens: Floats = zeros(experts)
        self.scores: Floats = zeros(experts)
        self.ranked: Ints = zeros(experts, np.int64)

    def evaluations(self, following: int, phase: int) -> Evaluations:
        """The next layer's gate."""
        del following, phase
        return Evaluations(gates=1)

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        """Name the next layer's experts by how many tokens want them, then by score."""
        layer = work.layer + 1
        if layer == view.layers:
            return 0
        wanted = self.top_k
        if work.phase == DECODE:
            wanted = self._copies_of_a_layer(work, view)
        for expert in range(view.experts):
            self.tokens[expert] = self.scores[expert] = 0.0
        for t in range(len(view.predicted)):
            for expert in range(view.experts):
                self.predicted[expert] = view.predicted[t, expert]
            for n in range(best_of(self.predicted, self.every, self.best[:wanted])):
                expert = self.best[n]
                self.tokens[expert] += 1.0
                self.scores[expert] += self.predicted[expert]
        ranked = self.ranked[: sort_wanted(self.tokens, self.scores, self.ranked)]
        return name_absent(view, layer, ranked, view.experts, False, named, 0)

    def _copies_of_a_layer(self, work: Work, view: MachineView) -> int:
        """Copies that the link makes while a layer lasts whose experts are all there,
        up to all experts.
        """
        # Where plans are made without a clock, the last layer may end in the future.
        seconds = max(0.0, view.gap_s)
        for i in range(work.active):
            seconds += work.gpu_s[0, i]
        copy_s = view.copy_s[work.layer + 1]
        # Copies may take no time at all.
        if seconds >= view.experts * copy_s:
            return view.experts
        return int(seconds / copy_s)

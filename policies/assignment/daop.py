"""DAOP's assignment, with the CPU's pre-calculation of the next layer."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Literal

from moesim.policies.assignment._placing import SpreadAssignment
from moesim.policies.names import IN_FLIGHT, PREFILL, SERIAL
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.routing._substitute import Substitution

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Gate, MachineView, Work
    from moesim.policies.run_context import RunContext

Overlap = Literal["parallel", "serial"]
Prefill = Literal["in-place", "cheapest"]
Ahead = Literal["kept", "predicted"]


class DAOP(SpreadAssignment):
    """Compute experts where their weights are; in decode, let the CPU start on the
    experts predicted for the next layer.

    The next gate, evaluated on this layer's input, predicts each token's top-k. Those
    that no GPU holds start on the CPU at once, behind this layer's own CPU experts; GPU
    experts of the next layer run there, on their own input. A wrong guess keeps the CPU
    busy and joins nothing. What was started is computed on the layer before's input: an
    approximation; a token for which an expert was not predicted gets it on its own
    input.

    Args:
        first_layer: first layer that is predicted; layers below it run on demand (the
            code's ``first_predict_layer`` is 5, so the first prediction is made at
            layer 4).
        before_first: ``parallel`` lets CPU and GPU experts of on-demand layers overlap,
            as the paper draws it; ``serial`` runs the CPU's after the GPU's fetched
            ones, as the code does where it fetches.
        prefill: ``in-place`` computes every expert of a prompt where its weights are,
            as the paper says; ``cheapest`` is the code's search over 2^N placements for
            the least *sum* of latencies, in which a resident costs nothing on the GPU
            and an absent one its load: each by itself, ties to the GPU. What is loaded
            so is not kept.

        ahead: ``kept`` starts only those of the predicted experts that degradation
            keeps, one absent expert per token; ``predicted`` starts all of them, for a
            routing that does not degrade.

    Source: DAOP (arXiv 2501.10375), Algorithm 1 and predictive pre-calculation with
    graceful degradation; its code, ``model/modeling_daop.py``.
    """

    approximates = True
    reads_tokens = True
    needs = ("pred1_raw",)

    def __init__(
        self,
        *,
        first_layer: int = 5,
        before_first: Overlap = "parallel",
        prefill: Prefill = "in-place",
        ahead: Ahead = "kept",
    ) -> None:
        expect(first_layer >= 1, "first_layer", "a number >= 1", first_layer)
        expect_choice("before_first", before_first, Overlap)
        expect_choice("prefill", prefill, Prefill)
        expect_choice("ahead", ahead, Ahead)
        self.first_layer = first_layer
        self.serial = before_first == "serial"
        self.cheapest = prefill == "cheapest"
        self.degrades = ahead == "kept"

    def start(self, context: RunContext) -> None:
        """Make room."""
        SpreadAssignment.start(self, context)
        self.token = Substitution(context.shape.experts)

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        if work.phase != PREFILL:
            self.allow_residents(work)
        elif self.cheapest:
            self._allow_cheap(work)
        else:
            self._allow_arrivals(work)
        self.spread(work, lanes)
        on_demand = work.layer < self.first_layer
        return SERIAL if on_demand and self.serial else 0

    def _allow_cheap(self, work: Work) -> None:
        """The smallest sum of costs is found expert by expert, without a search."""
        self.allow_all(work, False)
        for i in range(work.active):
            arrive_s = inf
            for gpu in range(work.gpus):
                arrive_s = min(arrive_s, work.arrive_s[gpu, i])
            if arrive_s <= max(work.host_s[i], work.cpu_s[i]):
                self.allow(work, i)

    def _allow_arrivals(self, work: Work) -> None:
        """What is being swapped in is awaited: the prompt runs on the new placement."""
        self.allow_residents(work)
        for gpu in range(work.gpus):
            for i in range(work.active):
                if work.arrive_s[gpu, i] < inf and work.state[i] == IN_FLIGHT:
                    self.allowed[gpu, i] = 1

    def precompute(
        self, gate: Gate, view: MachineView, routing: Ints, tokens: Ints
    ) -> int:
        """Predict what a layer's tokens will use, and start what no GPU holds."""
        if gate.phase == PREFILL or gate.layer < self.first_layer:
            return 0
        if not len(gate.predicted):
            return 0
        token = self.token
        top_k = gate.experts.shape[1]  # type: ignore[index]
        # Experts in flight count as absent: the CPU need not wait for them.
        token.look(view, gate.layer, False)
        for t in range(len(gate.predicted)):
            token.read(gate.predicted, t)
            token.choose(top_k)
            if self.degrades:
                token.keep_one_absent()
            for column in range(top_k):
                expert = token.experts[column]
                routing[t * top_k + column] = expert
                if not token.present[expert]:
                    tokens[expert] += 1
        return top_k

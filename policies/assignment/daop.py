"""DAOP's assignment, with the CPU's pre-calculation of the next layer."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.assignment._kernels import ascending, launch, some_gpu, spread
from moesim.policies.base import IN_FLIGHT
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import (
    ASSIGN,
    PRECOMPUTE,
    SERIAL,
    AssignmentKernels,
    GateWork,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import best_of
from moesim.policies.routing._substitute import keep_one_absent, on_gpu
from moesim.traces.format.schema import Phase

Overlap = Literal["parallel", "serial"]
Prefill = Literal["in-place", "cheapest"]
Ahead = Literal["kept", "predicted"]


_PREFILL = int(Phase.PREFILL)

# Places in the state's integers.
_FIRST_LAYER = 0
_SERIAL = 1
_CHEAPEST = 2
_KEPT = 3


@compiled(ASSIGN)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> int:
    """Place by residency, in ascending expert id."""
    in_prefill = work.phase == _PREFILL
    gpus, active = work.arrive_s.shape
    allowed = work.arrive_s == 0.0
    chosen = some_gpu(allowed)
    if in_prefill and state.integers[_CHEAPEST]:
        # The smallest sum of costs is found expert by expert, without a search.
        allowed = np.ones((0, 0), np.bool_)
        for i in range(active):
            arrive_s = np.inf
            for gpu in range(gpus):
                arrive_s = min(arrive_s, work.arrive_s[gpu, i])
            chosen[i] = arrive_s <= max(work.host_s[i], work.cpu_s[i])
    elif in_prefill:
        # What is being swapped in is awaited: the prompt runs on the new placement.
        for i in range(active):
            for gpu in range(gpus):
                comes = work.arrive_s[gpu, i] < np.inf and work.state[i] == IN_FLIGHT
                allowed[gpu, i] |= comes
                chosen[i] |= comes
    placed = spread(chosen, allowed, work.gpu_s, work.arrive_s, work.link_s)
    launch(lanes, order, placed, ascending(active))
    on_demand = work.layer < state.integers[_FIRST_LAYER]
    return SERIAL if on_demand and state.integers[_SERIAL] else 0


@compiled(PRECOMPUTE)
def _precompute(
    state: State, gate: GateWork, routing: np.ndarray, tokens: np.ndarray
) -> int:
    """Predict what a layer's tokens will use, and start what no GPU holds."""
    if gate.phase == _PREFILL or gate.layer < state.integers[_FIRST_LAYER]:
        return 0
    width = len(tokens)
    top_k = gate.experts.shape[1]
    # Experts in flight count as absent: the CPU need not wait for them.
    resident = on_gpu(gate, width, False)
    every = np.ones(width, np.bool_)
    for t in range(len(gate.predicted)):
        predicted = best_of(gate.predicted[t], every, top_k)
        if state.integers[_KEPT]:
            keep_one_absent(predicted, gate.predicted[t], resident)
        for column in range(top_k):
            expert = predicted[column]
            routing[t * top_k + column] = expert
            if not resident[expert]:
                tokens[expert] += 1
    return top_k


class DAOP(CompiledAssignment):
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
    precomputes_by_kernel: ClassVar[bool] = True
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
        rules = (
            first_layer,
            before_first == "serial",
            prefill == "cheapest",
            ahead == "kept",
        )
        known = state(integers=rules)
        self.brought = AssignmentKernels(_assign, known, _precompute)

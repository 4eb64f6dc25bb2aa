"""DALI's prefetch by the next gate on a residual-corrected input."""

from __future__ import annotations

from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch._ranked import PredictedWorkload, Tie
from moesim.policies.run_context import Evaluations


class Residual(PredictedWorkload):
    """Prefetch the experts with the highest workload predicted from residual-corrected
    features.

    The recorder adds the mean change of the gate input from one layer to the next,
    measured on a calibration split, before it evaluates the next gate; the trace holds
    those scores as ``pred1_res``. That gate is charged to the GPU, once per layer step;
    the stream switch of each copy is what its hand-off to the link takes.

    Args:
        size: experts ranked per layer, for which there is a buffer beside the cache; 4
            for DeepSeek and Qwen, 1 for Mixtral (DALI, figure 12).
        refill: False ranks all experts and transfers those of the top `size` that are
            absent, because the paper measures accuracy over the top k of all experts;
            True takes the next in rank instead.
        tie: between equal workloads, ``id`` takes the lower id, ``score`` the higher
            summed score.

    Source: DALI, equations 10-11.
    """

    # Only a recorder with a calibration split can write this column.
    needs = ("pred1_res",)

    def __init__(self, *, size: int = 4, refill: bool = False, tie: Tie = "id") -> None:
        expect(size >= 0, "size", "a number >= 0", size)
        expect_choice("tie", tie, Tie)
        self.buffer_slots = size
        self.ranks(size=size, refill=refill, tie=tie)

    def evaluations(self, following: int, phase: int) -> Evaluations:
        """One more gate, on the corrected input."""
        del following, phase
        return Evaluations(gates=1)

"""Prefetch by the coming layers' gates, evaluated on this layer's input."""

from __future__ import annotations

from moesim.policies.base import Late
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch._ranked import PredictedWorkload, Tie
from moesim.policies.run_context import Evaluations

# One per layer ahead, nearest first.
_COLUMNS = ("pred1_raw", "pred2_raw", "pred3_raw")


class NextGate(PredictedWorkload):
    """Prefetch the experts that the next gates choose for this layer's gate input.

    Adjacent layers see similar hidden states, so gate l+1 on the input of gate l is a
    fair guess.

    Args:
        size: experts per layer ahead, ranked by predicted workload (tokens whose
            predicted top-k holds them).
        depth: layers ahead, nearest first: 1 as Mixtral-Offloading, 3 as HybriMoE's
            look-ahead.
        refill: False lets experts that are present use up their rank (the share of
            `size` that is right is then the paper's prefetch accuracy); True takes the
            next in rank instead.
        tie: between equal workloads, ``id`` takes the lower id; ``score`` the higher
            summed score, which matters for one sequence, where all k predicted experts
            have workload 1.
        late: what becomes of copies that have not started when their layer comes:
            ``keep``, as Mixtral-Offloading knows no way to cancel; ``drop``; or
            ``active``, which keeps those that turn out to be right.
        requeue: whether farther layers' copies that have not started are taken back at
            every layer, to be predicted anew by a nearer gate; with a depth of 1 there
            are none.

    Source: Mixtral-Offloading; HybriMoE, section on prefetching (the impact ranking is
    another policy).
    """

    def __init__(
        self,
        *,
        size: int = 4,
        depth: int = 1,
        refill: bool = False,
        tie: Tie = "id",
        late: Late = "drop",
        requeue: bool = False,
    ) -> None:
        expect(size >= 0, "size", "a number >= 0", size)
        expect(1 <= depth <= len(_COLUMNS), "depth", f"1 to {len(_COLUMNS)}", depth)
        expect_choice("tie", tie, Tie)
        expect_choice("late", late, Late)
        self.depth = depth
        self.late = late
        self.requeue = requeue
        # A trace without the farther predictions still serves a smaller depth.
        self.needs = _COLUMNS[:depth]
        self.ranks(size=size, refill=refill, tie=tie)

    def evaluations(self, following: int, phase: int) -> Evaluations:
        """One gate for each layer ahead."""
        del phase
        return Evaluations(gates=min(self.depth, following))

"""The break-even rule of ik_llama.cpp: weights are copied for large batches only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.assignment._placing import SpreadAssignment
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext


class IkBreakEven(SpreadAssignment):
    """Fetch all of a layer's absent experts if the step has enough tokens, else compute
    all of them on the CPU.

    Enough is ``tokens >= experts / top_k * min_batch``: each expert then serves
    `min_batch` tokens in the mean. Residents always run on their GPU.

    Args:
        min_batch: tokens per expert from which one matrix product is worth its copy;
            the program's default is 32.

    Source: ik_llama.cpp, pull request 520.
    """

    def __init__(self, *, min_batch: int = 32) -> None:
        expect(min_batch >= 1, "min_batch", "a number >= 1", min_batch)
        self.min_batch = min_batch

    def start(self, context: RunContext) -> None:
        """Take the model's numbers."""
        SpreadAssignment.start(self, context)
        self.top_k = context.shape.top_k
        self.enough = context.shape.experts * self.min_batch

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        # Multiplied out, so that integers are compared.
        if work.rows * self.top_k >= self.enough:
            self.allow_all(work, True)
        else:
            self.allow_residents(work)
        self.spread(work, lanes)
        return 0

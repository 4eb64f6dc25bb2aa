"""The break-even rule of ik_llama.cpp: weights are copied for large batches only."""

from __future__ import annotations

import numpy as np

from moesim.policies.assignment._gpu_choice import allowed_lanes, gpu_lanes
from moesim.policies.base import Assignment, AssignmentPolicy, LayerWork, MachineView
from moesim.policies.parameters import expect


class IkBreakEven(AssignmentPolicy):
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

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Place the whole layer by one comparison, in ascending expert id."""
        # Multiplied out, so that integers are compared.
        choices = len(work.routing) * view.shape.top_k
        if choices >= view.shape.experts * self.min_batch:
            everything = np.ones(len(work.experts), np.bool_)
            return Assignment(gpu_lanes(work, everything))

        resident = work.arrive_s == 0.0
        return Assignment(allowed_lanes(work, resident))

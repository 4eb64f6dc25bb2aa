"""The break-even rule of ik_llama.cpp: weights are copied for large batches only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.assignment._kernels import ascending, launch, some_gpu, spread
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import ASSIGN, AssignmentKernels, State, Work, state
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.base import RunContext


@compiled(ASSIGN)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    allowed = work.arrive_s == 0.0
    chosen = some_gpu(allowed)
    # Multiplied out, so that integers are compared.
    if work.rows * state.integers[0] >= state.integers[1]:
        allowed = np.ones((0, 0), np.bool_)
        chosen = np.ones(len(lanes), np.bool_)
    placed = spread(chosen, allowed, work.gpu_s, work.arrive_s, work.link_s)
    launch(lanes, order, placed, ascending(len(lanes)))
    return False


class IkBreakEven(CompiledAssignment):
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
        super().start(context)
        shape = context.shape
        enough = [shape.top_k, shape.experts * self.min_batch]
        self.brought = AssignmentKernels(_assign, state(integers=enough))

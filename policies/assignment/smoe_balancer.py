"""SMoE's balancer: large misses over the link, small ones to the CPU."""

from __future__ import annotations

from typing import Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.assignment._kernels import launch, transfers
from moesim.policies.assignment._two_pointer import head_and_tail, load_or_compute
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import ASSIGN, AssignmentKernels, State, Work, state
from moesim.policies.parameters import expect_choice
from moesim.traces.format.schema import Phase

Form = Literal["faithful", "guarded"]
Prefill = Literal["gpu", "balance"]

PREFILL = int(Phase.PREFILL)


@compiled(ASSIGN)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    arrive_s = transfers(work.arrive_s, work.link_s)
    if state.integers[1] and work.phase == PREFILL:
        forever_s = np.full(len(lanes), np.inf)
        placed, decided = head_and_tail(
            work.tokens, forever_s, work.gpu_s, arrive_s, work.gpu_state, 0.0
        )
    else:
        placed, decided = load_or_compute(
            work.tokens,
            work.cpu_s,
            work.host_s,
            arrive_s,
            work.gpu_state,
            state.integers[0] != 0,
        )
    launch(lanes, order, placed, decided)
    return False


class SMoEBalancer(CompiledAssignment):
    """Load the largest miss while loading is not behind computing, else compute the
    smallest on the CPU.

    Misses are sorted by load, ties to the lower id. What is resident or in flight runs
    on the GPU. GPU compute after a load is ignored, as in the paper.

    Args:
        form: ``faithful`` always loads the first miss (0 <= 0), even a single one that
            the CPU would compute sooner: 3 instead of 1 in the reference's example.
            ``guarded`` leaves that one there. The default is the paper's.
        prefill: ``gpu`` loads every miss of a prefill and computes nothing on the CPU,
            as the paper's prefill pipeline does; ``balance`` treats it like decode.

    Source: SMoE (arXiv 2508.18983), Alg. 2; `guarded` is ours.
    """

    def __init__(self, *, form: Form = "faithful", prefill: Prefill = "gpu") -> None:
        expect_choice("form", form, Form)
        expect_choice("prefill", prefill, Prefill)
        self.form = form
        self.prefill = prefill
        rules = [form == "guarded", prefill == "gpu"]
        self.brought = AssignmentKernels(_assign, state(integers=rules))

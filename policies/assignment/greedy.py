"""DALI's greedy assignment."""

from __future__ import annotations

from moesim.policies.assignment._kernels import UNLIMITED, greedy_assign
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import AssignmentKernels, state
from moesim.policies.parameters import expect


class Greedy(CompiledAssignment):
    """Assign experts one by one, largest gap between CPU and GPU cost first, each to
    the lane that would end sooner.

    An expert costs ``max(arrive_s, gpu_s)`` on a GPU and ``max(host_s, cpu_s)`` on the
    CPU: a steady-state pipeline estimate that hides compute behind the next copy. Ties
    between lanes go to the GPU (the paper's ``<=``), ties between gaps to the lower id.
    With several GPUs the gap is that of the best GPU and the earliest-ending lane of
    all wins. Costless experts change no load, which is the paper's skip. An expert in
    flight costs a GPU what is left of its copy, and the CPU what it always does.

    Experts are launched in the order of decision. The gap of an absent expert on the
    GPU is what the CPU would lose on it, so the copies that pay most are on the link
    first, and what a late copy would delay is small.

    Args:
        staging: ``none`` ignores staging memory, as Alg. 1 does. A number lets at most
            so many experts that are not resident go to each GPU; the rest falls back to
            the CPU (equation 9, counting copies only).

    Source: DALI, Alg. 1; the second cost, `host_s`, is ours for machines whose experts
    come from an SSD.
    """

    def __init__(self, *, staging: int | None = None) -> None:
        holds = staging is None or staging >= 0
        expect(holds, "staging", "a number >= 0 or none", staging)
        self.staging = staging
        # A kernel takes no None.
        self._staging_limit = UNLIMITED if staging is None else staging
        # A kernel takes no None.
        limit = UNLIMITED if staging is None else staging
        self.brought = AssignmentKernels(greedy_assign, state(integers=[limit]))

"""DALI's greedy assignment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.assignment._placing import by_gap
from moesim.policies.base import AssignmentPolicy
from moesim.policies.names import CPU
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

_UNLIMITED = 1 << 62


class Greedy(AssignmentPolicy):
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
        self.limit = _UNLIMITED if staging is None else staging

    def start(self, context: RunContext) -> None:
        """Make room."""
        lanes = 1 + context.gpus
        self.gap_s: Floats = zeros(context.shape.experts)
        self.load_s: Floats = zeros(lanes)
        self.waited_s: Floats = zeros(lanes)
        self.staging_left: Ints = zeros(lanes, np.int64)

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        by_gap(work, self.gap_s, order)
        for lane in range(work.gpus + 1):
            self.load_s[lane] = self.waited_s[lane] = 0.0
            self.staging_left[lane] = self.limit
        for n in range(work.active):
            i = order[n]
            lane = CPU
            end_s = self.load_s[CPU] + max(work.host_s[i], work.cpu_s[i])
            # The lowest GPU that ties wins in the end, and wins against the CPU.
            for gpu in range(work.gpus, 0, -1):
                arrive_s = work.arrive_s[gpu - 1, i]
                if arrive_s > 0.0 and self.staging_left[gpu] <= 0:
                    continue
                if arrive_s > work.link_s[gpu - 1]:
                    # Only the first absent one waits for the copy under way.
                    arrive_s -= self.waited_s[gpu]
                cost_s = max(arrive_s, work.gpu_s[gpu - 1, i])
                if self.load_s[gpu] + cost_s <= end_s:
                    lane = gpu
                    end_s = self.load_s[gpu] + cost_s
            lanes[i] = lane
            self.load_s[lane] = end_s
            if lane != CPU and work.arrive_s[lane - 1, i] > 0.0:
                self.staging_left[lane] -= 1
                if work.arrive_s[lane - 1, i] > work.link_s[lane - 1]:
                    self.waited_s[lane] = work.link_s[lane - 1]
        return 0

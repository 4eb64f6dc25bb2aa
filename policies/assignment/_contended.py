"""Plans of a layer step where the processor and the links slow each other.

Both read host memory, so a copy that pays by itself may cost the CPU more than it
saves. A rule that plans in seconds knows what each operation takes alone: it plans
three times here, and the plan is taken that ends first when slowdowns are counted.

A active experts, E experts of a layer, G GPUs.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.assignment._placing import flying, transfer_s
from moesim.policies.base import AssignmentPolicy, Work
from moesim.policies.names import CPU

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView
    from moesim.policies.run_context import RunContext


_SOONER = 0.94
"""Times the end of a plan with copies that another one must stay below: what is copied
may serve later tokens, too. From runs of OLMoE and drawn Mixtral routing on seven
machines: 0.92 gives up most of the gain where copies are dear, 1 costs up to 3 % where
half of the experts fit.
"""


class PlannedInTime(AssignmentPolicy):
    """Base of rules that plan in seconds; a subclass fills in `plan`.

    With `sees_contention`, on a machine where copies and the CPU slow each other, a
    plan that copies is held against the rule's plan without copies, and against its
    plan at the speeds that link and CPU have beside each other. One of these is taken
    if it ends clearly sooner.

    Source: ours.
    """

    sees_contention = False

    def start(self, context: RunContext) -> None:
        """Take what the machine knows of link and CPU beside each other, make room."""
        experts = context.shape.experts
        self.link_factor = self.cpu_factor = 1.0
        if self.sees_contention and context.costs is not None:
            self.link_factor, self.cpu_factor = context.costs.overlap
        self.slows = self.link_factor > 1.0 or self.cpu_factor > 1.0
        self.imagined = Work(context.gpus, experts)
        self.cpu_s: Floats = zeros(experts)
        self.arrive_s: Floats = zeros((context.gpus, experts))
        self.link_s: Floats = zeros(context.gpus)
        self.lanes: Ints = zeros(experts, np.int8)
        self.order: Ints = zeros(experts, np.int64)
        self.copied_s: Floats = zeros(context.gpus)
        self.gpu_end_s: Floats = zeros(context.gpus)

    def plan(self, work: Work, lanes: Ints, order: Ints) -> None:
        """Fill in lanes and order, as `assign` does, for operations that do not slow
        each other.
        """
        raise NotImplementedError

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        self.plan(work, lanes, order)
        if not self.slows or not self._copies(work, lanes):
            return 0
        least_s = _SOONER * self.end_s(work, lanes, order)
        for copies in range(2):
            self._imagine(work, copies > 0)
            self.plan(self.imagined, self.lanes, self.order)
            end_s = self.end_s(work, self.lanes, self.order)
            if end_s < least_s:
                least_s = end_s
                for i in range(work.active):
                    lanes[i] = self.lanes[i]
                    order[i] = self.order[i]
        return 0

    def _copies(self, work: Work, lanes: Ints) -> bool:
        """Whether a plan wants copies that have not begun."""
        for i in range(work.active):
            if lanes[i] != CPU and self._is_absent(work, lanes[i] - 1, i):
                return True
        return False

    def _is_absent(self, work: Work, gpu: int, i: int) -> bool:
        return work.arrive_s[gpu, i] > 0.0 and not flying(work, gpu, i)

    def _imagine(self, work: Work, copies: bool) -> None:
        """Make the same layer step at the speeds that link and CPU have beside each
        other, or one in which nothing more can be copied.
        """
        imagined = self.imagined
        imagined.active = work.active
        imagined.gpus = work.gpus
        imagined.phase = work.phase
        imagined.first_cpu_s = work.first_cpu_s
        imagined.experts = work.experts
        imagined.tokens = work.tokens
        imagined.state = work.state
        imagined.host_s = work.host_s
        imagined.gpu_s = work.gpu_s
        imagined.gpu_state = work.gpu_state
        imagined.cpu_s = self.cpu_s
        imagined.arrive_s = self.arrive_s
        imagined.link_s = self.link_s
        cpu_factor = link_factor = 1.0
        if copies:
            cpu_factor = self.cpu_factor
            link_factor = self.link_factor
        for i in range(work.active):
            self.cpu_s[i] = work.cpu_s[i] * cpu_factor
            self.lanes[i] = CPU
            self.order[i] = i
        for g in range(work.gpus):
            self.link_s[g] = work.link_s[g] * link_factor
            for i in range(work.active):
                self.arrive_s[g, i] = work.arrive_s[g, i] * link_factor
                if not copies and self._is_absent(work, g, i):
                    self.arrive_s[g, i] = inf

    def end_s(self, work: Work, lanes: Ints, order: Ints) -> float:
        """Seconds of a plan, slowdowns counted.

        Every link copies what is under way, then what is absent, in launch order; a GPU
        computes residents, then what lands. The CPU works at ``1 / cpu_factor`` beside
        each link that copies, a link at ``1 / link_factor`` beside the CPU.

        Args:
            work: the layer step.
            lanes: int8 [A].
            order: int64 [A], launch order.
        """
        cpu_s = self._add_up(work, lanes)
        cpu_end_s = self._cpu_end_s(cpu_s, work.gpus)
        self._compute_arrivals(work, lanes, order, cpu_end_s)
        last_s = cpu_end_s
        for g in range(work.gpus):
            last_s = max(last_s, self.gpu_end_s[g])
        return last_s

    def _add_up(self, work: Work, lanes: Ints) -> float:
        """Add up what links and GPUs have to do, as if alone; the same of the CPU."""
        cpu_s = 0.0
        for g in range(work.gpus):
            self.copied_s[g] = work.link_s[g]
            self.gpu_end_s[g] = 0.0
        for i in range(work.active):
            g = lanes[i] - 1
            if g < 0:
                cpu_s += max(work.host_s[i], work.cpu_s[i])
            elif work.arrive_s[g, i] == 0.0:
                self.gpu_end_s[g] += work.gpu_s[g, i]
            elif flying(work, g, i):
                self.copied_s[g] = max(self.copied_s[g], work.arrive_s[g, i])
        for g in range(work.gpus):
            self.link_s[g] = self.copied_s[g]
        for i in range(work.active):
            g = lanes[i] - 1
            if g >= 0 and self._is_absent(work, g, i):
                self.link_s[g] += transfer_s(work, g, i)
        return cpu_s + work.first_cpu_s if cpu_s > 0.0 else 0.0

    def _compute_arrivals(
        self, work: Work, lanes: Ints, order: Ints, cpu_end_s: float
    ) -> None:
        """Let GPUs compute what lands, as it lands, behind what they hold."""
        for n in range(work.active):
            i = order[n]
            g = lanes[i] - 1
            if g < 0 or work.arrive_s[g, i] == 0.0:
                continue
            copied_s = work.arrive_s[g, i]
            if not flying(work, g, i):
                self.copied_s[g] += transfer_s(work, g, i)
                copied_s = self.copied_s[g]
            lands_s = self._lands_s(copied_s, cpu_end_s)
            self.gpu_end_s[g] = max(self.gpu_end_s[g], lands_s) + work.gpu_s[g, i]

    def _cpu_end_s(self, cpu_s: float, gpus: int) -> float:
        """When the CPU has done so many seconds of work, beside links that copy for
        `link_s` seconds each.
        """
        now_s = 0.0
        while True:
            busy = 0
            next_s = inf
            for g in range(gpus):
                link_end_s = self.link_s[g] * self.link_factor
                if link_end_s > now_s:
                    busy += 1
                    next_s = min(next_s, link_end_s)
            slowdown = 1.0
            for _ in range(busy):
                slowdown *= self.cpu_factor
            if now_s + cpu_s * slowdown <= next_s:
                return now_s + cpu_s * slowdown
            cpu_s -= (next_s - now_s) / slowdown
            now_s = next_s

    def _lands_s(self, copied_s: float, cpu_end_s: float) -> float:
        """When a link has done so many seconds of work, beside a CPU that works until
        `cpu_end_s`.
        """
        if copied_s * self.link_factor <= cpu_end_s:
            return copied_s * self.link_factor
        return cpu_end_s + copied_s - cpu_end_s / self.link_factor

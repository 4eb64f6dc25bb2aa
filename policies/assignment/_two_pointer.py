"""What HybriMoE's released schedule and SMoE's balancer share: one list of experts by
load, a pointer from its head, another from its tail, until they meet.

A active experts, E experts of a layer, G GPUs.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.assignment._placing import flying, transfer_s
from moesim.policies.base import AssignmentPolicy
from moesim.policies.names import CPU

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext


class TwoPointers(AssignmentPolicy):
    """Base of the two.

    Attributes:
        sequence: int32 [E], positions of the list.
        group: uint8 [E], what comes later in it.
        cpu_s, gpu_s: float64 [E] and [G, E], what the rule reckons with.
        arrive_s: float64 [G, E], without the wait for the copy under way.
        link_s: float64 [G], when each link is free: once what is in flight has landed.
        flying: uint8 [G, E].
    """

    def start(self, context: RunContext) -> None:
        """Make room."""
        experts = context.shape.experts
        by_gpu = (context.gpus, experts)
        self.sequence: Ints = zeros(experts, np.int32)
        self.group: Ints = zeros(experts, np.uint8)
        self.cpu_s: Floats = zeros(experts)
        self.gpu_s: Floats = zeros(by_gpu)
        self.arrive_s: Floats = zeros(by_gpu)
        self.flying: Ints = zeros(by_gpu, np.uint8)
        self.link_s: Floats = zeros(context.gpus)
        self.gpu_end_s: Floats = zeros(context.gpus)

    def take_costs(self, work: Work) -> None:
        """Reckon with the seconds of a layer step."""
        for i in range(work.active):
            self.cpu_s[i] = work.cpu_s[i]
        for g in range(work.gpus):
            for i in range(work.active):
                self.gpu_s[g, i] = work.gpu_s[g, i]
                self.arrive_s[g, i] = transfer_s(work, g, i)

    def watch_links(self, work: Work) -> None:
        """Note what is on its way, and when its link is free."""
        for g in range(work.gpus):
            self.link_s[g] = self.gpu_end_s[g] = 0.0
            for i in range(work.active):
                self.flying[g, i] = flying(work, g, i)
                if self.flying[g, i]:
                    self.link_s[g] = max(self.link_s[g], self.arrive_s[g, i])

    def sort(self, work: Work) -> None:
        """List positions by group, then by load, highest first, ties to the lower."""
        sequence = self.sequence
        for i in range(work.active):
            j = i
            while j > 0 and self._follows(work, sequence[j - 1], i):
                sequence[j] = sequence[j - 1]
                j -= 1
            sequence[j] = i

    def _follows(self, work: Work, a: int, b: int) -> bool:
        """Whether `a` belongs behind `b`."""
        if self.group[a] != self.group[b]:
            return self.group[a] > self.group[b]
        return work.tokens[a] < work.tokens[b]

    def head_and_tail(
        self, work: Work, first_s: float, lanes: Ints, order: Ints
    ) -> None:
        """One list, residents before the rest, each by load descending: its head to a
        GPU or its tail to the CPU.

        Whichever would end no later is done, ties to the GPU. A copy waits for the
        copies before it; a GPU for the copy.

        Source: HybriMoE's released code (`HSS`); several GPUs: the head goes to the one
        that ends first.
        """
        self.watch_links(work)
        for i in range(work.active):
            self.group[i] = 1
            for g in range(work.gpus):
                if self.arrive_s[g, i] <= 0.0:
                    self.group[i] = 0
        self.sort(work)
        cpu_end_s = 0.0
        head = 0
        tail = work.active - 1
        for n in range(work.active):
            i = self.sequence[head]
            g = self._soonest(work, i)
            if g < 0:
                # No GPU could finish it, so it must not keep the others from theirs.
                head += 1
            else:
                last = self.sequence[tail]
                if self.end_s <= cpu_end_s + self.cpu_s[last] + first_s:
                    self._give(g, i)
                    lanes[i] = 1 + g
                    order[n] = i
                    head += 1
                    continue
                i = last
                tail -= 1
            cpu_end_s += self.cpu_s[i] + first_s
            first_s = 0.0
            lanes[i] = CPU
            order[n] = i

    def _soonest(self, work: Work, i: int) -> int:
        """The GPU that would end an expert first, which is noted; -1 if none would."""
        best = -1
        self.end_s = inf
        for g in range(work.gpus):
            # Only a new copy queues behind the link; one in flight has its own landing.
            lands_s = self.arrive_s[g, i]
            if not self.flying[g, i] and lands_s != 0.0:
                lands_s = self.link_s[g] + self.arrive_s[g, i]
            end_s = max(self.gpu_end_s[g], lands_s) + self.gpu_s[g, i]
            if end_s < self.end_s:
                best = g
                self.end_s = end_s
        return best

    def _give(self, g: int, i: int) -> None:
        """Let a GPU, and its link, work until that end."""
        self.gpu_end_s[g] = self.end_s
        if not self.flying[g, i] and self.arrive_s[g, i] > 0.0:
            self.link_s[g] += self.arrive_s[g, i]

"""HybriMoE's list scheduler: simulates a layer step on GPUs, CPU and links.

Source: HybriMoE (arXiv 2504.05897), section on scheduling, in two readings, R2 and R1:
see `HybriMoESchedule`.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints

NOTHING, ON_GPU, ON_CPU, ON_LINK = range(4)


class ListScheduler:
    """Each GPU takes what it holds, highest load first; the CPU what no GPU holds,
    lowest load first, and when that has run out (and with `stealing`) the lowest load
    that a GPU holds; each link brings the highest load that no GPU holds. What lands
    joins the GPU's queue. Ties: GPUs, CPU, links.

    What is in flight when the layer step begins stays in the CPU's reach until it is
    computed: the CPU need not wait for its landing. What the schedule itself copies
    does not: a copy is for its GPU. What no lane could finish is left to the CPU and
    counts nothing.

    Attributes:
        soonest_end: the operation that would end first comes next; else the one that
            would start first.
        stealing: the CPU also takes what a GPU holds.
        cpu_s: float64 [E].
        gpu_s: float64 [G, E].
        arrive_s: float64 [G, E]; of an absent expert, its copy alone.
        flying: uint8 [G, E], 1 for copies under way; their link is free when the last
            has landed.
        link_s: float64 [G], until each link has ended copies for other layers; changes.
        falling, rising: int32 [E], positions by descending and by ascending load.
    """

    def __init__(
        self,
        gpus: int,
        experts: int,
        *,
        soonest_end: bool = True,
        stealing: bool = True,
    ) -> None:
        self.gpus = gpus
        self.soonest_end = soonest_end
        self.stealing = stealing
        by_gpu = (gpus, experts)
        self.cpu_s: Floats = zeros(experts)
        self.gpu_s: Floats = zeros(by_gpu)
        self.arrive_s: Floats = zeros(by_gpu)
        self.flying: Ints = zeros(by_gpu, np.uint8)
        self.link_s: Floats = zeros(gpus)
        self.falling: Ints = zeros(experts, np.int32)
        self.rising: Ints = zeros(experts, np.int32)
        self.lands_s: Floats = zeros(by_gpu)
        self.gpu_end_s: Floats = zeros(gpus)
        # A GPU has it or awaits it: no link brings it.
        self.for_gpu: Ints = zeros(experts, np.uint8)
        self.cached: Ints = zeros(experts, np.uint8)
        # From the CPU.
        self.barred: Ints = zeros(experts, np.uint8)
        # The schedule itself copies it.
        self.fetched: Ints = zeros(experts, np.uint8)
        self.done: Ints = zeros(experts, np.uint8)
        # The operation that comes next.
        self.kind = NOTHING
        self.device = self.chosen = 0
        self.key_s = self.end_s = 0.0

    def sort(self, tokens: Ints, active: int) -> None:
        """Sort positions by load; ties go to the lower."""
        falling = self.falling
        rising = self.rising
        for i in range(active):
            j = i
            while j > 0 and tokens[falling[j - 1]] < tokens[i]:
                falling[j] = falling[j - 1]
                j -= 1
            falling[j] = i
            j = i
            while j > 0 and tokens[rising[j - 1]] > tokens[i]:
                rising[j] = rising[j - 1]
                j -= 1
            rising[j] = i

    def simulate(self, active: int, first_s: float, lanes: Ints, order: Ints) -> float:
        """Simulate the layer step of the first `active` experts, which are sorted, one
        operation at a time; the makespan.

        Args:
            active: A.
            first_s: extra seconds of the first CPU expert.
            lanes: int8 [A], filled in.
            order: int64 [A], filled in: experts as they were given to a lane or a link.
        """
        self._begin(active, first_s)
        ordered = 0
        remaining = active
        while remaining:
            self._next(active)
            i = self.chosen
            # A fetched expert is ordered once, by its copy; when the GPU computes it
            # later, it has its position already.
            if not self.fetched[i]:
                order[ordered] = i
                ordered += 1
            if self.kind == ON_LINK:
                self.link_s[self.device] = self.end_s
                self.lands_s[self.device, i] = self.end_s
                self.for_gpu[i] = self.barred[i] = self.fetched[i] = 1
                continue
            remaining -= 1
            self.done[i] = 1
            lanes[i] = 0
            if self.kind == ON_GPU:
                self.gpu_end_s[self.device] = self.end_s
                lanes[i] = 1 + self.device
            elif self.kind == ON_CPU:
                self.cpu_end_s = self.end_s
                self.cpu_extra_s = 0.0
        makespan_s = self.cpu_end_s
        for g in range(self.gpus):
            makespan_s = max(makespan_s, self.gpu_end_s[g])
        return makespan_s

    def _begin(self, active: int, first_s: float) -> None:
        """Note residents and copies under way."""
        self.cpu_end_s = 0.0
        self.cpu_extra_s = first_s
        # Positions before which nothing is left: no search begins anew.
        self.uncomputed = self.uncached = self.stolen = self.copied = 0
        for g in range(self.gpus):
            self.gpu_end_s[g] = 0.0
        for i in range(active):
            lands_s = copy_s = inf
            for g in range(self.gpus):
                self.lands_s[g, i] = inf
                # An expert that a GPU would compute forever has no business there.
                if self.gpu_s[g, i] == inf:
                    continue
                arrive_s = self.arrive_s[g, i]
                if arrive_s == 0.0 or self.flying[g, i]:
                    self.lands_s[g, i] = arrive_s
                    lands_s = min(lands_s, arrive_s)
                    # Links copy in order, so the last landing frees one.
                    self.link_s[g] = max(self.link_s[g], arrive_s)
                copy_s = min(copy_s, arrive_s)
            self.cached[i] = lands_s == 0.0
            self.for_gpu[i] = lands_s < inf or copy_s == inf
            self.barred[i] = self.cpu_s[i] == inf
            self.fetched[i] = self.done[i] = 0

    def _next(self, active: int) -> None:
        """Find the operation that comes next; `NOTHING` if none would ever end."""
        self.kind = NOTHING
        self.key_s = inf
        while self.done[self.falling[self.uncomputed]]:
            self.uncomputed += 1
        self.chosen = self.falling[self.uncomputed]
        for g in range(self.gpus):
            self._offer_gpu(g, active)
        self._offer_cpu(active)
        self._offer_link(active)

    def _offer(
        self, kind: int, device: int, i: int, start_s: float, end_s: float
    ) -> None:
        """Take an operation if it comes before the best so far."""
        key_s = end_s if self.soonest_end else start_s
        if key_s < self.key_s:
            self.key_s = key_s
            self.kind = kind
            self.device = device
            self.chosen = i
            self.end_s = end_s

    def _offer_gpu(self, g: int, active: int) -> None:
        """The highest load that a GPU holds, or what lands first."""
        free_s = self.gpu_end_s[g]
        best = -1
        start_s = inf
        for n in range(self.uncomputed, active):
            i = self.falling[n]
            if self.done[i]:
                continue
            begin_s = max(free_s, self.lands_s[g, i])
            if begin_s < start_s:
                best = i
                start_s = begin_s
                # Nothing starts earlier, and what follows has a lower load.
                if start_s == free_s:
                    break
        if best >= 0:
            self._offer(ON_GPU, g, best, start_s, start_s + self.gpu_s[g, best])

    def _offer_cpu(self, active: int) -> None:
        """The lowest load that no GPU holds, or that one does."""
        self.uncached = self._lowest(active, self.uncached, False)
        n = self.uncached
        if n == active and self.stealing:
            self.stolen = self._lowest(active, self.stolen, True)
            n = self.stolen
        if n < active:
            i = self.rising[n]
            end_s = self.cpu_end_s + self.cpu_s[i] + self.cpu_extra_s
            self._offer(ON_CPU, -1, i, self.cpu_end_s, end_s)

    def _lowest(self, active: int, n: int, cached: bool) -> int:
        """Place, from the n-th on, of the lowest load that the CPU may take."""
        while n < active:
            i = self.rising[n]
            if not self.done[i] and not self.barred[i] and self.cached[i] == cached:
                break
            n += 1
        return n

    def _offer_link(self, active: int) -> None:
        """The highest load that no GPU holds, on the link that is free first."""
        while self.copied < active:
            i = self.falling[self.copied]
            if not self.done[i] and not self.for_gpu[i]:
                break
            self.copied += 1
        else:
            return
        best = -1
        for g in range(self.gpus):
            comes = self.arrive_s[g, i] < inf and self.gpu_s[g, i] < inf
            if comes and (best < 0 or self.link_s[g] < self.link_s[best]):
                best = g
        start_s = self.link_s[best]
        self._offer(ON_LINK, best, i, start_s, start_s + self.arrive_s[best, i])

"""SMoE's balancer: large misses over the link, small ones to the CPU."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Literal

from moesim.policies.assignment._two_pointer import TwoPointers
from moesim.policies.names import CPU, PREFILL
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work

Form = Literal["faithful", "guarded"]
Prefill = Literal["gpu", "balance"]


class SMoEBalancer(TwoPointers):
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
        self.guarded = form == "guarded"
        self.fetches_prompts = prefill == "gpu"

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        self.take_costs(work)
        if self.fetches_prompts and work.phase == PREFILL:
            for i in range(work.active):
                self.cpu_s[i] = inf
            self.head_and_tail(work, 0.0, lanes, order)
        else:
            self._load_or_compute(work, lanes, order)
        return 0

    def _load_or_compute(self, work: Work, lanes: Ints, order: Ints) -> None:
        """Misses by load descending: load the largest while loading is not behind, else
        compute the smallest. Several GPUs: the link that is free first loads.
        """
        self.watch_links(work)
        misses = 0
        for i in range(work.active):
            lanes[i] = self._where(work, i)
            self.group[i] = lanes[i] == CPU
            misses += self.group[i]
        self.sort(work)
        head = work.active - misses
        tail = work.active - 1
        for n in range(head):
            order[n] = self.sequence[n]
        cpu_end_s = 0.0
        for n in range(head, work.active):
            i = self.sequence[head]
            g = self._free_link(work, i)
            compute_s = max(work.host_s[i], work.cpu_s[i])
            if g < 0:
                # No link brings it, so it must not keep the others from theirs.
                cpu_end_s += compute_s
                head += 1
                order[n] = i
                continue
            stays = self.guarded and misses == 1 and compute_s <= self.arrive_s[g, i]
            if self.link_s[g] <= cpu_end_s and not stays:
                self.link_s[g] += self.arrive_s[g, i]
                lanes[i] = 1 + g
                head += 1
            else:
                i = self.sequence[tail]
                cpu_end_s += max(work.host_s[i], work.cpu_s[i])
                tail -= 1
            order[n] = i

    def _where(self, work: Work, i: int) -> int:
        """The lane of the GPU where an expert is, or lands, first; the CPU's for a
        miss.
        """
        lane = CPU
        for g in range(work.gpus):
            if not self.flying[g, i] and self.arrive_s[g, i] != 0.0:
                continue
            if lane == CPU or self.arrive_s[g, i] < self.arrive_s[lane - 1, i]:
                lane = 1 + g
        return lane

    def _free_link(self, work: Work, i: int) -> int:
        """The link that is free first, of those that could bring an expert; -1 if
        none.
        """
        best = -1
        for g in range(work.gpus):
            comes = self.arrive_s[g, i] < inf
            if comes and (best < 0 or self.link_s[g] < self.link_s[best]):
                best = g
        return best

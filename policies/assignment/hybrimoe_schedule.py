"""HybriMoE's assignment as its paper describes it: a simulated schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from moesim.policies.assignment._contended import PlannedInTime
from moesim.policies.assignment._list_scheduler import ListScheduler
from moesim.policies.assignment._placing import flying, transfer_s
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

Reading = Literal["r1", "r2"]


class HybriMoESchedule(PlannedInTime):
    """Simulate GPU, CPU and link on this layer's experts, and keep the simulated lanes
    and order.

    The GPU takes cached experts, highest load first; the CPU uncached ones, lowest load
    first, then steals the lowest cached one; the link brings the highest uncached one.
    Ties between loads go to the lower id. The paper repeats "the timeline with the
    earliest completion", which can be read in two ways:

    ``r2``: the operation that would *end* first comes next. ``r1``: the timeline that
    is *free* first does its next operation. R1 never leaves a lane idle, so it gives
    work to a lane that is slow at it: two uncached experts of load 1 take 4 instead of
    2 (one is copied although the CPU would have done both), two cached of load 10 take
    10 instead of 2 (one is stolen). That is why R2 is the default. Neither is optimal.

    A lane runs what it was given in the simulated order, except that a GPU really runs
    residents before arrivals. An expert in flight joins the GPU's queue when it lands,
    and the CPU's meanwhile, among the uncached ones: whoever would end it first, by the
    reading, takes it. The link is free after it. Shared experts are part of the dense
    work before. With several GPUs each has a queue and a link, the lower first in ties.

    Args:
        reading: ``r2`` or ``r1``.
        stealing: whether the CPU may take cached experts when no uncached one is left.
        contention: whether a schedule that copies is held against one without copies,
            and one at the speeds that CPU and link have beside each other; the one that
            ends first is kept. The paper knows no such slowdowns.

    Source: HybriMoE (arXiv 2504.05897), section on scheduling; tie order GPU, CPU, link
    and `contention` are ours.
    """

    calibrates_planning: ClassVar[bool] = True

    def __init__(
        self,
        *,
        reading: Reading = "r2",
        stealing: bool = True,
        contention: bool = False,
    ) -> None:
        expect_choice("reading", reading, Reading)
        self.reading = reading
        self.stealing = stealing
        self.sees_contention = contention

    def start(self, context: RunContext) -> None:
        """Make room."""
        PlannedInTime.start(self, context)
        self.scheduler = ListScheduler(
            context.gpus,
            context.shape.experts,
            soonest_end=self.reading == "r2",
            stealing=self.stealing,
        )

    def plan(self, work: Work, lanes: Ints, order: Ints) -> None:
        scheduler = self.scheduler
        scheduler.gpus = work.gpus
        scheduler.cpu_s = work.cpu_s
        scheduler.gpu_s = work.gpu_s
        for g in range(work.gpus):
            scheduler.link_s[g] = work.link_s[g]
            for i in range(work.active):
                scheduler.arrive_s[g, i] = transfer_s(work, g, i)
                scheduler.flying[g, i] = flying(work, g, i)
        scheduler.sort(work.tokens, work.active)
        scheduler.simulate(work.active, work.first_cpu_s, lanes, order)

"""HybriMoE's assignment as its paper describes it: a simulated schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from moesim.machine_code.functions import compiled
from moesim.policies.assignment._kernels import flying, launch, transfers
from moesim.policies.assignment._list_scheduler import list_schedule
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import ASSIGN, AssignmentKernels, State, Work, state
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    import numpy as np

Reading = Literal["r1", "r2"]


@compiled(ASSIGN)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    placed, decided, _ = list_schedule(
        work.tokens,
        work.cpu_s,
        work.gpu_s,
        transfers(work.arrive_s, work.link_s),
        flying(work.gpu_state, work.arrive_s),
        work.link_s,
        work.first_cpu_s,
        state.integers[0] != 0,
        state.integers[1] != 0,
    )
    launch(lanes, order, placed, decided)
    return False


class HybriMoESchedule(CompiledAssignment):
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

    Source: HybriMoE (arXiv 2504.05897), section on scheduling; tie order GPU, CPU, link
    is ours.
    """

    calibrates_planning: ClassVar[bool] = True

    def __init__(self, *, reading: Reading = "r2", stealing: bool = True) -> None:
        expect_choice("reading", reading, Reading)
        self.reading = reading
        self.stealing = stealing
        # What comes next, and whether the CPU may steal: the kernel's last arguments.
        self._rule = (reading == "r2", stealing)
        self._first_s: float | None = None
        rules = [reading == "r2", stealing]
        self.brought = AssignmentKernels(_assign, state(integers=rules))

"""Fiddler's assignment: load an expert's weights only if that beats computing it on the
CPU.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.machine_code.types import input_array
from moesim.policies.assignment._kernels import flying, launch, spread
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import (
    ASSIGN,
    ORDER,
    SECONDS,
    SECONDS_BY_GPU,
    AssignmentKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect_choice

Cost = Literal["load", "load+compute"]
Issue = Literal["serial", "parallel"]


@compiled(
    nb.Several((nb.boolean[::1], ORDER))(
        SECONDS,
        SECONDS,
        SECONDS_BY_GPU,
        SECONDS_BY_GPU,
        input_array(nb.boolean, 2),
        nb.boolean,
    )
)
def _compare(
    cpu_s: np.ndarray,
    host_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    coming: np.ndarray,
    computes: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Which experts run on a GPU, bool [A], and their order: residents, then loads."""
    active = len(cpu_s)
    on_gpu = np.empty(active, np.bool_)
    loaded = np.empty(active, np.bool_)
    for i in range(active):
        best_s = np.inf
        least_load_s = np.inf
        for g in range(len(gpu_s)):
            # The load of a copy in flight is paid for already.
            load_s = 0.0 if coming[g, i] else arrive_s[g, i]
            least_load_s = min(least_load_s, load_s)
            if computes and load_s > 0.0:
                load_s += gpu_s[g, i]
            best_s = min(best_s, load_s)
        on_gpu[i] = best_s <= max(host_s[i], cpu_s[i])
        loaded[i] = least_load_s > 0.0
    order = np.empty(active, np.int64)
    count = 0
    for loads in (False, True):
        for i in range(active):
            if loaded[i] == loads:
                order[count] = i
                count += 1
    return on_gpu, order


@compiled(ASSIGN)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    chosen, decided = _compare(
        work.cpu_s,
        work.host_s,
        work.gpu_s,
        work.arrive_s,
        flying(work.gpu_state, work.arrive_s),
        state.integers[0] != 0,
    )
    anywhere = np.ones((0, 0), np.bool_)
    placed = spread(chosen, anywhere, work.gpu_s, work.arrive_s, work.link_s)
    launch(lanes, order, placed, decided)
    return state.integers[1] != 0


class Fiddler(CompiledAssignment):
    """Compute residents on the GPU, and an absent expert there too if loading it takes
    no longer than the CPU.

    The code searches all 2^8 placements for the smallest *sum* of costs, which is this
    independent comparison; ties go to the GPU, and a resident costs nothing there, so
    the CPU never gets one (`static-threshold` compares residents too). Residents are
    launched first, then loads, each in ascending id. With several GPUs the one that
    would finish first takes the expert.

    Args:
        issue: ``serial`` starts the CPU when the loaded experts are done, as the
            release issues them (residents, whose kernels are asynchronous, still
            overlap the CPU); ``parallel`` overlaps loads and CPU too. The decision,
            being a sum, is the same for both.
        cost: what the CPU is compared with: ``load``, the time until the weights are on
            the GPU (the release's constant is that alone); ``load+compute`` adds the
            expert's time there.

    Source: Fiddler (arXiv 2402.07033), `src/fiddler/mixtral.py`.
    """

    def __init__(self, *, cost: Cost = "load", issue: Issue = "serial") -> None:
        expect_choice("cost", cost, Cost)
        expect_choice("issue", issue, Issue)
        self.cost = cost
        self.serial = issue == "serial"
        rules = [cost == "load+compute", issue == "serial"]
        self.brought = AssignmentKernels(_assign, state(integers=rules))

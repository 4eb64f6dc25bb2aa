"""DALI's beam search: several partial assignments are kept at a time."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.policies.assignment._kernels import cost_s, gap_order, launch
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import (
    ASSIGN,
    LANES,
    ORDER,
    SECONDS,
    SECONDS_BY_GPU,
    AssignmentKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect


@compiled
def _rank(
    end_s: np.ndarray,
    sum_s: np.ndarray,
    kept: int,
    makespan_s: float,
    total_s: float,
) -> int:
    """Rank of a new partial assignment: behind the `kept` ones that are no worse."""
    rank = kept
    while rank > 0 and (
        makespan_s < end_s[rank - 1]
        or (makespan_s == end_s[rank - 1] and total_s < sum_s[rank - 1])
    ):
        rank -= 1
    return rank


@compiled(
    nb.Several((LANES, ORDER))(
        SECONDS, SECONDS, SECONDS_BY_GPU, SECONDS_BY_GPU, SECONDS, nb.int64
    )
)
def beam_search(
    cpu_s: np.ndarray,
    host_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    link_s: np.ndarray,
    width: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Take experts in greedy's order and keep the `width` best partial assignments.

    A child beats another by smaller makespan, then smaller sum of lane loads, then
    earlier generation (parents in rank order, GPUs before the CPU). The first absent
    expert on a GPU waits for the copy under way on its link, `link_s` [G].

    Returns:
        lanes int8 [A] of the best complete assignment, and the order int64 [A].

    Source: DALI, appendix A.2.
    """
    gpus = len(gpu_s)
    active = len(cpu_s)
    lanes_total = gpus + 1
    order = gap_order(cpu_s, host_s, gpu_s, arrive_s)

    # Loads of this expert's parents and children take turns in two halves of one array.
    load_s = np.zeros((2, width, lanes_total), np.float64)
    end_s = np.empty(width, np.float64)
    sum_s = np.empty(width, np.float64)
    added = np.empty(width, np.float64)
    parent = np.empty((active, width), np.int64)
    chosen = np.empty((active, width), np.int8)

    # Whether an assignment's lane has waited for its link, beside its loads.
    waited = np.zeros((2, width, lanes_total), np.bool_)

    beams = 1
    for n in range(active):
        i = order[n]
        before = load_s[n % 2]
        after = load_s[1 - n % 2]
        kept = 0
        for child in range(beams * lanes_total):
            p = child // lanes_total
            # Lanes 1, 2, …, 0: the CPU's child is generated last, so GPUs win ties.
            lane = (child + 1) % lanes_total
            added_s = cost_s(lane, i, cpu_s, host_s, gpu_s, arrive_s)
            if lane > 0 and arrive_s[lane - 1, i] > link_s[lane - 1]:
                transfer_s = arrive_s[lane - 1, i] - link_s[lane - 1]
                added_s = max(transfer_s, gpu_s[lane - 1, i])
                if not waited[n % 2, p, lane]:
                    added_s += link_s[lane - 1]
            lane_s = before[p, lane] + added_s
            makespan_s = max(before[p].max(), lane_s)
            total_s = before[p].sum() - before[p, lane] + lane_s

            rank = _rank(end_s, sum_s, kept, makespan_s, total_s)
            if rank == width:
                continue
            kept = min(kept + 1, width)
            for j in range(kept - 1, rank, -1):
                end_s[j] = end_s[j - 1]
                added[j] = added[j - 1]
                sum_s[j] = sum_s[j - 1]
                parent[n, j] = parent[n, j - 1]
                chosen[n, j] = chosen[n, j - 1]
            end_s[rank] = makespan_s
            added[rank] = added_s
            sum_s[rank] = total_s
            parent[n, rank] = p
            chosen[n, rank] = lane

        beams = kept
        for j in range(beams):
            lane = chosen[n, j]
            after[j] = before[parent[n, j]]
            after[j, lane] += added[j]
            waited[1 - n % 2, j] = waited[n % 2, parent[n, j]]
            if lane > 0 and arrive_s[lane - 1, i] > link_s[lane - 1]:
                waited[1 - n % 2, j, lane] = True

    # Rank 0 of the last expert is the best; its lanes are read back parent by parent.
    lanes = np.empty(active, np.int8)
    j = 0
    for n in range(active - 1, -1, -1):
        lanes[order[n]] = chosen[n, j]
        j = parent[n, j]
    return lanes, order


@compiled(ASSIGN)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    placed, decided = beam_search(
        work.cpu_s,
        work.host_s,
        work.gpu_s,
        work.arrive_s,
        link_s=work.link_s,
        width=state.integers[0],
    )
    launch(lanes, order, placed, decided)
    return False


class Beam(CompiledAssignment):
    """Assign experts in greedy's order, keeping the `width` best partial assignments.

    Best is the smallest makespan; costs and launch order are greedy's. Equal makespans
    rank by the smaller sum of lane loads, then by order of generation (better parent
    first, GPUs before the CPU). Not always better than greedy: a beam may drop the
    start that greedy's rule would have kept.

    Args:
        width: assignments kept after each expert; the paper's is 2. From ``2 **
            active`` on it is exhaustive.

    Source: DALI, appendix A.2 (which gives no tie rule).
    """

    calibrates_planning: ClassVar[bool] = True

    def __init__(self, *, width: int = 2) -> None:
        expect(width >= 1, "width", "a number >= 1", width)
        self.width = width
        self.brought = AssignmentKernels(_assign, state(integers=[width]))

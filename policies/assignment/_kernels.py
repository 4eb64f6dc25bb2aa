"""Compiled decisions of DALI's assignments: launch order, greedy and beam search.

Each kernel takes the raw arrays of `LayerWork` and returns fresh ones. They share one
cost model, `cost_s`, so they stand in one file (see `moesim.policies.compilation`).

A active experts, G GPUs. Lane 0 is the CPU, lane 1 + g is GPU g.
"""

from __future__ import annotations

import numpy as np
from numba import types as nb

from moesim.policies.compilation import (
    LANES,
    ORDER,
    SECONDS,
    SECONDS_BY_GPU,
    inlined,
)
from moesim.traces.compilation import compiled

UNLIMITED = 1 << 62
"""As `staging`: any number of experts."""

# Below this many experts an insertion sort beats NumPy's merge sort (measured: about
# 50).
_INSERTION_LIMIT = 48


@inlined
def cost_s(
    lane: int,
    i: int,
    cpu_s: np.ndarray,
    host_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
) -> float:
    """Seconds expert `i` adds to a lane: computing, or the weights' arrival where that
    takes longer.

    Source: DALI, equation 5 (GPU); the CPU's form is the same with the time until the
    weights are in host memory.
    """
    if lane == 0:
        wait_s = host_s[i]
        compute_s = cpu_s[i]
    else:
        wait_s = arrive_s[lane - 1, i]
        compute_s = gpu_s[lane - 1, i]
    return float(max(wait_s, compute_s))


@compiled(ORDER(SECONDS, SECONDS, SECONDS_BY_GPU, SECONDS_BY_GPU))
def gap_order(
    cpu_s: np.ndarray,
    host_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
) -> np.ndarray:
    """Positions by |t_gpu - t_cpu|, largest first, ties to the lower position: int64
    [A].

    t_gpu is the best GPU's. Source: DALI, Alg. 1.
    """
    gpus = len(gpu_s)
    active = len(cpu_s)
    gap = np.empty(active, np.float64)
    for i in range(active):
        best = np.inf
        for lane in range(1, gpus + 1):
            best = min(best, cost_s(lane, i, cpu_s, host_s, gpu_s, arrive_s))
        gap[i] = abs(best - cost_s(0, i, cpu_s, host_s, gpu_s, arrive_s))

    # Both sorts are stable, which is what gives ties to the lower position.
    if active > _INSERTION_LIMIT:
        return np.argsort(-gap, kind="mergesort")

    order = np.empty(active, np.int64)
    for i in range(active):
        j = i
        while j > 0 and gap[order[j - 1]] < gap[i]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = i
    return order


@compiled(
    nb.Tuple((LANES, ORDER))(
        SECONDS,
        SECONDS,
        SECONDS_BY_GPU,
        SECONDS_BY_GPU,
        SECONDS,
        nb.int64,
    )
)
def greedy(
    cpu_s: np.ndarray,
    host_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    link_s: np.ndarray,
    staging: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Give each expert, largest gap first, to the lane that would end first; ties GPU
    first, then lower GPU.

    At most `staging` experts that are not resident go to each GPU. The first absent one
    on a GPU waits for the copy under way on its link, `link_s` [G]; the next ones come
    behind the first, which has waited already.

    Returns:
        lanes int8 [A] and the order int64 [A] in which they were decided.

    Source: DALI, Alg. 1; several GPUs as in our reading of its section 6.5.
    """
    gpus = len(gpu_s)
    active = len(cpu_s)
    order = gap_order(cpu_s, host_s, gpu_s, arrive_s)
    lanes = np.empty(active, np.int8)
    load_s = np.zeros(gpus + 1, np.float64)
    staging_left = np.full(gpus + 1, staging, np.int64)
    waited_s = np.zeros(gpus + 1, np.float64)

    for i in order:
        chosen = 0
        end_s = load_s[0] + cost_s(0, i, cpu_s, host_s, gpu_s, arrive_s)

        # GPUs from the highest down, each winning ties: so the lowest GPU wins in the
        # end, and any GPU wins against the CPU (the paper's `<=`).
        for lane in range(gpus, 0, -1):
            absent = arrive_s[lane - 1, i] > 0.0
            if absent and staging_left[lane] <= 0:
                continue
            gpu_cost_s = cost_s(lane, i, cpu_s, host_s, gpu_s, arrive_s)
            if arrive_s[lane - 1, i] > link_s[lane - 1]:
                # Absent: what is in flight lands when the link is free, not later.
                transfer_s = arrive_s[lane - 1, i] - waited_s[lane]
                gpu_cost_s = max(transfer_s, gpu_s[lane - 1, i])
            gpu_end_s = load_s[lane] + gpu_cost_s
            if gpu_end_s <= end_s:
                chosen = lane
                end_s = gpu_end_s

        if chosen > 0 and arrive_s[chosen - 1, i] > 0.0:
            staging_left[chosen] -= 1
            if arrive_s[chosen - 1, i] > link_s[chosen - 1]:
                waited_s[chosen] = link_s[chosen - 1]
        load_s[chosen] = end_s
        lanes[i] = chosen
    return lanes, order


@inlined
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
    nb.Tuple((LANES, ORDER))(
        SECONDS,
        SECONDS,
        SECONDS_BY_GPU,
        SECONDS_BY_GPU,
        SECONDS,
        nb.int64,
    )
)
def beam(
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

"""Compiled decisions that assignments share: costs, launch order, greedy, all on GPUs.

Each kernel takes the raw arrays of `LayerWork` and returns fresh ones. They share one
cost model, `cost_s`, so they stand in one file.

A active experts, G GPUs. Lane 0 is the CPU, lane 1 + g is GPU g.
"""

from __future__ import annotations

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.machine_code.types import input_array
from moesim.policies.base import IN_FLIGHT
from moesim.policies.kernels import (
    ASSIGN,
    LANES,
    ORDER,
    SECONDS,
    SECONDS_BY_GPU,
    State,
    Work,
)

UNLIMITED = 1 << 62
"""As `staging`: any number of experts."""

# Below this many experts an insertion sort beats NumPy's merge sort (measured: about
# 50).
_INSERTION_LIMIT = 48


@compiled
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
    nb.void(
        SECONDS,
        SECONDS,
        SECONDS_BY_GPU,
        SECONDS_BY_GPU,
        SECONDS,
        nb.int64,
        LANES,
        ORDER,
    )
)
def greedy(
    cpu_s: np.ndarray,
    host_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    link_s: np.ndarray,
    staging: int,
    lanes: np.ndarray,
    order: np.ndarray,
) -> None:
    """Give each expert, largest gap first, to the lane that would end first; ties GPU
    first, then lower GPU.

    At most `staging` experts that are not resident go to each GPU. The first absent one
    on a GPU waits for the copy under way on its link, `link_s` [G]; the next ones come
    behind the first, which has waited already.

    Fills in `lanes` int8 [A] and `order` int64 [A], in which they were decided: to
    return new arrays would take a third longer.

    Source: DALI, Alg. 1; several GPUs as in our reading of its section 6.5.
    """
    gpus = len(gpu_s)
    order[:] = gap_order(cpu_s, host_s, gpu_s, arrive_s)
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


@compiled
def launch(
    lanes: np.ndarray, order: np.ndarray, result: np.ndarray, decided: np.ndarray
) -> None:
    """Hand over lanes and order as the protocol wants them."""
    for i in range(len(lanes)):
        lanes[i] = result[i]
        order[i] = decided[i]


@compiled(ASSIGN)
def greedy_assign(
    state: State, work: Work, lanes: np.ndarray, order: np.ndarray
) -> bool:
    """Place by `greedy`; the staging limit is the state's first integer."""
    greedy(
        work.cpu_s,
        work.host_s,
        work.gpu_s,
        work.arrive_s,
        work.link_s,
        state.integers[0],
        lanes,
        order,
    )
    return False


@compiled
def ascending(count: int) -> np.ndarray:
    """Positions as they stand, int64."""
    return np.arange(count)


@compiled
def flying(gpu_state: np.ndarray, arrive_s: np.ndarray) -> np.ndarray:
    """Which active experts are on their way to which GPU: bool [G, A].

    A copy that lands this very moment counts as resident.
    """
    gpus, active = arrive_s.shape
    result = np.empty((gpus, active), np.bool_)
    for g in range(gpus):
        for i in range(active):
            coming = gpu_state[g * active + i] == IN_FLIGHT
            result[g, i] = coming and arrive_s[g, i] > 0.0
    return result


@compiled
def transfers(arrive_s: np.ndarray, link_s: np.ndarray) -> np.ndarray:
    """`arrive_s` without the wait for the copy under way: float64 [G, A].

    What is in flight lands with that copy; what is absent, after it.
    """
    result = arrive_s.copy()
    for g in range(len(result)):
        for i in range(result.shape[1]):
            if result[g, i] > link_s[g]:
                result[g, i] -= link_s[g]
    return result


@compiled
def some_gpu(on: np.ndarray) -> np.ndarray:
    """Which experts some GPU has, bool [A], of bool [G, A]."""
    result = np.zeros(on.shape[1], np.bool_)
    for g in range(len(on)):
        for i in range(on.shape[1]):
            result[i] |= on[g, i]
    return result


@compiled(
    LANES(
        input_array(nb.boolean),
        input_array(nb.boolean, 2),
        SECONDS_BY_GPU,
        SECONDS_BY_GPU,
        SECONDS,
    )
)
def spread(
    chosen: np.ndarray,
    allowed: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    link_s: np.ndarray,
) -> np.ndarray:
    """Lanes of experts of which those `chosen`, bool [A], run on a GPU: int8 [A].

    Each of them, in ascending id, goes to the GPU that would finish it first among
    those `allowed`, bool [G, A] or of no rows for all; ties to the lower GPU. That is
    greedy's rule on a machine whose CPU takes forever, so that all gaps are equal.
    """
    gpus, active = gpu_s.shape
    lanes = np.zeros(active, np.int8)
    count = 0
    for i in range(active):
        lanes[i] = chosen[i]
        count += chosen[i]
    if gpus == 1 or not count:
        return lanes

    forever_s = np.full(count, np.inf)
    some_gpu_s = np.empty((gpus, count))
    some_arrive_s = np.empty((gpus, count))
    n = 0
    for i in range(active):
        if not chosen[i]:
            continue
        for g in range(gpus):
            some_arrive_s[g, n] = arrive_s[g, i]
            some_gpu_s[g, n] = gpu_s[g, i]
            if len(allowed) and not allowed[g, i]:
                some_gpu_s[g, n] = np.inf
        n += 1
    fastest = np.empty(count, np.int8)
    decided = np.empty(count, np.int64)
    greedy(
        forever_s,
        forever_s,
        some_gpu_s,
        some_arrive_s,
        link_s,
        UNLIMITED,
        fastest,
        decided,
    )
    n = 0
    for i in range(active):
        if chosen[i]:
            lanes[i] = fastest[n]
            n += 1
    return lanes

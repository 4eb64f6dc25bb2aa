"""The inner loops of the decisions, compiled ahead of the first call.

A decision is paid for on the critical path of every layer, so the loops over active
experts are machine code. Each kernel takes the raw arrays of `LayerWork` and returns
fresh ones; its signature is explicit, so nothing compiles while a replay runs, and the
result is cached beside this file. All kernels live in this one file because that cache
does not notice changes in another file's functions.

A active experts, G GPUs, C candidates, M incoming, T tokens, E experts of a layer, K
experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numba
import numpy as np
from moesim.traces.compilation import compiled
from numba import types as nb

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_R = TypeVar("_R")


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Paste `function` into the kernels that call it (a compiled call here doubled
    greedy's time).
    """
    pasted: Callable[_P, _R] = numba.njit(inline="always")(function)
    return pasted


def _array(dtype: Any, ndim: int = 1) -> Any:
    """C-contiguous input; writable arrays are accepted too."""
    return nb.Array(dtype, ndim, "C", readonly=True)


_TIMES = _array(nb.float64)
_TIMES_G = _array(nb.float64, 2)
_LANES = nb.int8[::1]
_ORDER = nb.int64[::1]
_MUTABLE = nb.float64[::1]

UNLIMITED = 1 << 62
"""Room for any number of experts."""

_INSERTION_LIMIT = 48
"""Below this many experts an insertion sort beats NumPy's merge sort (measured: about
50).
"""


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


@compiled(nb.int64[::1](_TIMES, _TIMES, _TIMES_G, _TIMES_G))
def gap_order(
    cpu_s: np.ndarray, host_s: np.ndarray, gpu_s: np.ndarray, arrive_s: np.ndarray
) -> np.ndarray:
    """Positions by |t_gpu - t_cpu|, largest first, ties to the lower position: int64
    [A].

    t_gpu is the best GPU's. Source: DALI, Alg. 1.
    """
    gpus, active = gpu_s.shape
    gap = np.empty(active, np.float64)
    for i in range(active):
        best = np.inf
        for lane in range(1, gpus + 1):
            best = min(best, cost_s(lane, i, cpu_s, host_s, gpu_s, arrive_s))
        gap[i] = abs(best - cost_s(0, i, cpu_s, host_s, gpu_s, arrive_s))
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


@compiled(nb.Tuple((_LANES, _ORDER))(_TIMES, _TIMES, _TIMES_G, _TIMES_G, nb.int64))
def greedy(
    cpu_s: np.ndarray,
    host_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    staging: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Give each expert, largest gap first, to the lane that would end first; ties GPU
    first, then lower GPU.

    At most `staging` experts that are not resident go to each GPU.

    Returns:
        lanes int8 [A] and the order int64 [A] in which they were decided.

    Source: DALI, Alg. 1; several GPUs as in our reading of its section 6.5.
    """
    gpus, active = gpu_s.shape
    order = gap_order(cpu_s, host_s, gpu_s, arrive_s)
    lanes = np.empty(active, np.int8)
    load_s = np.zeros(gpus + 1, np.float64)
    room = np.full(gpus + 1, staging, np.int64)
    for i in order:
        chosen = 0
        end_s = load_s[0] + cost_s(0, i, cpu_s, host_s, gpu_s, arrive_s)
        for lane in range(gpus, 0, -1):
            if room[lane] <= 0 and arrive_s[lane - 1, i] > 0.0:
                continue
            gpu_end_s = load_s[lane] + cost_s(lane, i, cpu_s, host_s, gpu_s, arrive_s)
            if gpu_end_s <= end_s:
                chosen = lane
                end_s = gpu_end_s
        if chosen > 0 and arrive_s[chosen - 1, i] > 0.0:
            room[chosen] -= 1
        load_s[chosen] = end_s
        lanes[i] = chosen
    return lanes, order


@inlined
def _rank(
    end_s: np.ndarray, sum_s: np.ndarray, kept: int, makespan_s: float, total_s: float
) -> int:
    """Place of a new beam behind the `kept` ones that are no worse."""
    at = kept
    while at > 0 and (
        makespan_s < end_s[at - 1]
        or (makespan_s == end_s[at - 1] and total_s < sum_s[at - 1])
    ):
        at -= 1
    return at


@compiled(nb.Tuple((_LANES, _ORDER))(_TIMES, _TIMES, _TIMES_G, _TIMES_G, nb.int64))
def beam(
    cpu_s: np.ndarray,
    host_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    width: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Take experts in greedy's order and keep the `width` best partial assignments.

    A child beats another by smaller makespan, then smaller sum of lane loads, then
    earlier generation (parents in rank order, GPUs before the CPU).

    Returns:
        lanes int8 [A] of the best complete assignment, and the order int64 [A].

    Source: DALI, appendix A.2.
    """
    gpus, active = gpu_s.shape
    lanes_total = gpus + 1
    order = gap_order(cpu_s, host_s, gpu_s, arrive_s)
    load_s = np.zeros((2, width, lanes_total), np.float64)
    end_s = np.empty(width, np.float64)
    sum_s = np.empty(width, np.float64)
    parent = np.empty((active, width), np.int64)
    chosen = np.empty((active, width), np.int8)
    beams = 1
    for n in range(active):
        i = order[n]
        before = load_s[n % 2]
        after = load_s[1 - n % 2]
        kept = 0
        for child in range(beams * lanes_total):
            p = child // lanes_total
            lane = (child + 1) % lanes_total
            lane_s = before[p, lane] + cost_s(lane, i, cpu_s, host_s, gpu_s, arrive_s)
            makespan_s = max(before[p].max(), lane_s)
            total_s = before[p].sum() - before[p, lane] + lane_s
            at = _rank(end_s, sum_s, kept, makespan_s, total_s)
            if at == width:
                continue
            kept = min(kept + 1, width)
            for j in range(kept - 1, at, -1):
                end_s[j], sum_s[j] = end_s[j - 1], sum_s[j - 1]
                parent[n, j], chosen[n, j] = parent[n, j - 1], chosen[n, j - 1]
            end_s[at] = makespan_s
            sum_s[at] = total_s
            parent[n, at] = p
            chosen[n, at] = lane
        beams = kept
        for j in range(beams):
            lane = chosen[n, j]
            after[j] = before[parent[n, j]]
            after[j, lane] += cost_s(lane, i, cpu_s, host_s, gpu_s, arrive_s)
    lanes = np.empty(active, np.int8)
    j = 0
    for n in range(active - 1, -1, -1):
        lanes[order[n]] = chosen[n, j]
        j = parent[n, j]
    return lanes, order


@compiled(nb.int64[::1](_array(nb.int64), _TIMES, _TIMES, nb.int64))
def lowest(
    candidates: np.ndarray, score: np.ndarray, tie: np.ndarray, count: int
) -> np.ndarray:
    """Find the `count` candidates with the lowest score, then lowest `tie`, then lowest
    key, in that order.

    `candidates` int64 [C] ascending keys into `score` and `tie`. Returns int64 [count],
    -1 where C < count.
    """
    best = np.full(count, -1, np.int64)
    kept = 0
    for key in candidates:
        at = kept
        while at > 0:
            other = best[at - 1]
            if score[key] > score[other] or (
                score[key] == score[other] and tie[key] >= tie[other]
            ):
                break
            at -= 1
        if at == count:
            continue
        kept = min(kept + 1, count)
        for j in range(kept - 1, at, -1):
            best[j] = best[j - 1]
        best[at] = key
    return best


@compiled(nb.int64[::1](_array(nb.int64), _TIMES))
def soonest(keys: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Sort a few `keys`, int64 [M], by descending score, equal ones as they stand."""
    order = np.empty(len(keys), np.int64)
    for n in range(len(keys)):
        at = n
        while at > 0 and score[keys[n]] > score[order[at - 1]]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = keys[n]
    return order


@compiled(nb.int64[::1](_array(nb.int64), _array(nb.int64), _TIMES))
def outscored(
    incoming: np.ndarray, candidates: np.ndarray, score: np.ndarray
) -> np.ndarray:
    """Keep the C best of `incoming` and `candidates`: a victim for each incoming key,
    -1 to decline it.

    The best incoming key meets the worst candidate, and so on; a key that scores below
    its opponent is declined, an equal one admitted. `incoming` int64 [M], `candidates`
    int64 [C] ascending. Returns int64 [M].
    """
    worst = lowest(candidates, score, score, len(incoming))
    victims = np.full(len(incoming), -1, np.int64)
    rank = np.empty(len(incoming), np.int64)  # best first; a few keys, so by insertion
    for n in range(len(incoming)):
        at = n
        while at > 0 and score[incoming[n]] > score[incoming[rank[at - 1]]]:
            rank[at] = rank[at - 1]
            at -= 1
        rank[at] = n
    for n in range(len(incoming)):
        key = incoming[rank[n]]
        if worst[n] < 0 or score[key] < score[worst[n]]:
            break
        victims[rank[n]] = worst[n]
    return victims


@compiled(
    nb.void(
        _MUTABLE, nb.boolean[::1], _array(nb.int32), nb.int64, nb.int64, nb.float64
    ),
)
def count_accesses(
    score: np.ndarray,
    counted: np.ndarray,
    experts: np.ndarray,
    first: int,
    width: int,
    decay: float,
) -> None:
    """Age the `width` scores from key `first` by `decay`, then add 1 to each of
    `experts` that is counted.

    `score` float64 [keys] and `counted` bool [keys] by flat key; `experts` int32 [A]
    relative to `first`.
    """
    if decay < 1.0:
        for key in range(first, first + width):
            score[key] *= decay
    for expert in experts:
        key = first + expert
        if counted[key]:
            score[key] += 1.0


@compiled(nb.void(_MUTABLE, _array(nb.int32), nb.int64, nb.float64))
def stamp(score: np.ndarray, experts: np.ndarray, first: int, now: float) -> None:
    """Set the score of each of `experts`, int32 [A] relative to key `first`, to
    `now`.
    """
    for expert in experts:
        score[first + expert] = now


@compiled(
    nb.void(
        _MUTABLE,
        _array(nb.int32),
        _array(nb.int64),
        nb.int64,
        nb.int64,
        nb.int64,
        nb.int64,
    )
)
def foresee(
    score: np.ndarray,
    experts: np.ndarray,
    uses: np.ndarray,
    layer: int,
    layers: int,
    width: int,
    never: int,
) -> None:
    """Score each expert by minus the place, ``step * layers + layer``, of its next use;
    never is minus infinity.

    `experts` int32 [A] of one layer of `width` experts; `uses` int64 [A] their next
    steps, `never` or later for none.
    """
    for i in range(len(experts)):
        score[layer * width + experts[i]] = (
            -np.inf if uses[i] >= never else -float(uses[i] * layers + layer)
        )


@compiled(nb.int64[::1](_array(nb.float32, 2), nb.int64))
def predicted_workload(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Count how often each expert is among a token's `top_k` best scores, ties to the
    lower id.

    `scores` float32 [T, E]. Returns int64 [E].
    """
    tokens, experts = scores.shape
    top_k = min(top_k, experts)
    workload = np.zeros(experts, np.int64)
    best = np.empty(top_k, np.int64)
    for t in range(tokens):
        kept = 0
        for expert in range(experts):
            at = kept
            while at > 0 and scores[t, expert] > scores[t, best[at - 1]]:
                at -= 1
            if at == top_k:
                continue
            kept = min(kept + 1, top_k)
            for j in range(kept - 1, at, -1):
                best[j] = best[j - 1]
            best[at] = expert
        for n in range(kept):
            workload[best[n]] += 1
    return workload

"""Two-pointer assignments: HybriMoE's released schedule and SMoE's balancer.

Experts stand in a list by load. One pointer runs from its head, the other from its
tail, until they meet. `state` holds ABSENT, IN_FLIGHT or RESIDENT of every expert, one
GPU after the other: int8 [G * A]. A link is free once what is in flight has landed.

A active experts, G GPUs.
"""

from __future__ import annotations

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.machine_code.types import input_array
from moesim.policies.base import IN_FLIGHT
from moesim.policies.kernels import EXPERT_IDS, LANES, ORDER, SECONDS, SECONDS_BY_GPU

_STATE = input_array(nb.int8)


@compiled
def _by_load(
    tokens: np.ndarray,
    group: np.ndarray,
) -> np.ndarray:
    """Positions by group, then by load, highest first, ties to the lower position:
    int64 [A].
    """
    order = np.empty(len(tokens), np.int64)
    for i in range(len(tokens)):
        j = i
        while j > 0:
            before = order[j - 1]
            if group[before] < group[i] or (
                group[before] == group[i] and tokens[before] >= tokens[i]
            ):
                break
            order[j] = before
            j -= 1
        order[j] = i
    return order


@compiled
def _links(
    arrive_s: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Which experts are on their way to which GPU, bool [G, A], and when that link is
    free, float64 [G].
    """
    gpus = len(arrive_s)
    active = arrive_s.shape[1]
    flying = np.empty((gpus, active), np.bool_)
    free_s = np.zeros(gpus)
    for g in range(gpus):
        for i in range(active):
            # A copy that lands this very moment counts as resident.
            flying[g, i] = state[g * active + i] == IN_FLIGHT and arrive_s[g, i] > 0.0
            if flying[g, i]:
                free_s[g] = max(free_s[g], arrive_s[g, i])
    return flying, free_s


@compiled(
    nb.Several((LANES, ORDER))(
        EXPERT_IDS,
        SECONDS,
        SECONDS_BY_GPU,
        SECONDS_BY_GPU,
        _STATE,
        nb.float64,
    )
)
def head_and_tail(
    tokens: np.ndarray,
    cpu_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    state: np.ndarray,
    first_s: float,
) -> tuple[np.ndarray, np.ndarray]:
    """One list, residents before the rest, each by load descending: its head to a GPU
    or its tail to the CPU.

    Whichever would end no later is done, ties to the GPU. A copy waits for the copies
    before it; a GPU for the copy.

    Returns:
        lanes int8 [A] and the order int64 [A] of the decisions.

    Source: HybriMoE's released code (`HSS`); several GPUs: the head goes to the one
    that ends first.
    """
    gpus = len(gpu_s)
    active = len(cpu_s)
    flying, link_s = _links(arrive_s, state)
    absent = np.ones(active, np.bool_)
    for g in range(gpus):
        for i in range(active):
            absent[i] &= arrive_s[g, i] > 0.0

    sequence = _by_load(tokens, absent)
    lanes = np.empty(active, np.int8)
    order = np.empty(active, np.int64)
    gpu_end_s = np.zeros(gpus)
    cpu_end_s = 0.0
    cpu_extra_s = first_s
    head = 0
    tail = active - 1

    for n in range(active):
        i = sequence[head]
        chosen = 0
        best_s = np.inf
        for g in range(gpus):
            # Only a new copy queues behind the link; one in flight has its own landing.
            lands_s = arrive_s[g, i]
            if not flying[g, i] and arrive_s[g, i] != 0.0:
                lands_s = link_s[g] + arrive_s[g, i]
            end_s = max(gpu_end_s[g], lands_s) + gpu_s[g, i]
            if end_s < best_s:
                chosen = g
                best_s = end_s

        if best_s == np.inf:
            # No GPU could finish it, so it must not keep the others from theirs.
            cpu_end_s += cpu_s[i] + cpu_extra_s
            cpu_extra_s = 0.0
            lanes[i] = 0
            head += 1
        elif best_s <= cpu_end_s + cpu_s[sequence[tail]] + cpu_extra_s:
            gpu_end_s[chosen] = best_s
            if not flying[chosen, i] and arrive_s[chosen, i] > 0.0:
                link_s[chosen] += arrive_s[chosen, i]
            lanes[i] = 1 + chosen
            head += 1
        else:
            i = sequence[tail]
            cpu_end_s += cpu_s[i] + cpu_extra_s
            cpu_extra_s = 0.0
            lanes[i] = 0
            tail -= 1
        order[n] = i
    return lanes, order


@compiled
def _next_link(link_s: np.ndarray, arrive_s: np.ndarray, i: int) -> int:
    """The link that is free first, of those that could bring an expert; -1 if none."""
    chosen = -1
    for g in range(len(link_s)):
        comes = arrive_s[g, i] < np.inf
        if comes and (chosen < 0 or link_s[g] < link_s[chosen]):
            chosen = g
    return chosen


@compiled(
    nb.Several((LANES, ORDER))(
        EXPERT_IDS,
        SECONDS,
        SECONDS,
        SECONDS_BY_GPU,
        _STATE,
        nb.boolean,
    )
)
def load_or_compute(
    tokens: np.ndarray,
    cpu_s: np.ndarray,
    host_s: np.ndarray,
    arrive_s: np.ndarray,
    state: np.ndarray,
    guarded: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Misses by load descending: load the largest while loading is not behind, else
    compute the smallest.

    What is resident or in flight goes to its GPU and is launched first. With `guarded`,
    a single miss that the CPU computes no later than it loads stays there.

    Returns:
        lanes int8 [A] and the order int64 [A].

    Source: SMoE, Alg. 2; several GPUs: the link that is free first loads.
    """
    gpus = len(arrive_s)
    active = len(cpu_s)
    flying, link_s = _links(arrive_s, state)
    lanes = np.empty(active, np.int8)
    order = np.empty(active, np.int64)
    missed = np.zeros(active, np.bool_)
    misses = 0
    for i in range(active):
        lanes[i] = 0
        for g in range(gpus):
            # On several GPUs at once: the one where it is, or lands, first.
            present = flying[g, i] or arrive_s[g, i] == 0.0
            if present and (
                lanes[i] == 0 or arrive_s[g, i] < arrive_s[lanes[i] - 1, i]
            ):
                lanes[i] = 1 + g
        if lanes[i] == 0:
            missed[i] = True
            misses += 1

    sequence = _by_load(tokens, missed)
    for n in range(active - misses):
        order[n] = sequence[n]

    cpu_end_s = 0.0
    head = active - misses
    tail = active - 1
    for n in range(active - misses, active):
        largest = sequence[head]
        g = _next_link(link_s, arrive_s, largest)
        compute_s = max(host_s[largest], cpu_s[largest])
        if g < 0:
            # No link brings it, so it must not keep the others from theirs.
            cpu_end_s += compute_s
            head += 1
            order[n] = largest
            continue
        stays = guarded and misses == 1 and compute_s <= arrive_s[g, largest]
        if link_s[g] <= cpu_end_s and not stays:
            i = largest
            link_s[g] += arrive_s[g, i]
            lanes[i] = 1 + g
            head += 1
        else:
            i = sequence[tail]
            cpu_end_s += max(host_s[i], cpu_s[i])
            tail -= 1
        order[n] = i
    return lanes, order

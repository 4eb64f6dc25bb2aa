"""HybriMoE's list scheduler: simulates a layer step on GPUs, CPU and links.

Each GPU takes what it holds, highest load first; the CPU what no GPU holds, lowest load
first, and when that has run out (and with `stealing`) the lowest load that a GPU holds;
each link brings the highest load that no GPU holds. What lands joins the GPU's queue.
What is in flight when the layer step begins stays in the CPU's reach until it is
computed: the CPU need not wait for its landing. What the schedule itself copies does
not: a copy is for its GPU. What no lane could finish is left to the CPU and counts
nothing.

A active experts, G GPUs.

Source: HybriMoE (arXiv 2504.05897), section on scheduling, in two readings, R2 and R1:
see `HybriMoESchedule`.
"""

from __future__ import annotations

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.machine_code.types import input_array
from moesim.policies.kernels import EXPERT_IDS, LANES, ORDER, SECONDS, SECONDS_BY_GPU

# Kinds of operation that may come next.
_NONE = -1
_GPU = 0
_CPU = 1
_LINK = 2

# What is known of an expert, added up.
_FOR_GPU = 1
"""A GPU has it or awaits it: no link brings it."""
_NOT_UNCACHED = 2
"""The CPU does not take it as an uncached one,"""
_NOT_CACHED = 4
"""nor as a cached one."""
_FETCHED = 8
"""The schedule itself copies it."""
_DONE = 16
"""It has been computed."""

_NOT_FOR_CPU = _NOT_UNCACHED | _NOT_CACHED

# Places in `front`.
_UNCOMPUTED = 0
_UNCACHED = 1
_CACHED = 2
_COPIED = 3

FRONTS = 4
"""Numbers in `front`."""


@compiled
def by_load(tokens: np.ndarray, falling: np.ndarray, rising: np.ndarray) -> None:
    """Fill in positions by descending and by ascending load, both int64 [A]; ties go to
    the lower position.
    """
    for i in range(len(tokens)):
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


@compiled
def _begin(
    cpu_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    flying: np.ndarray,
    lands_s: np.ndarray,
    link_s: np.ndarray,
    known: np.ndarray,
) -> None:
    """Note residents and copies under way, when the layer step begins.

    Fills in when each GPU may start each expert (0 resident, inf not on its way),
    `lands_s` [G, A], and what is `known` of each, int8 [A]. Delays `link_s` [G] until
    what is under way has landed.
    """
    gpus = len(arrive_s)
    for i in range(len(cpu_s)):
        first_s = np.inf
        copy_s = np.inf
        for g in range(gpus):
            lands_s[g, i] = np.inf
            # An expert that a GPU would compute forever has no business there.
            if gpu_s[g, i] == np.inf:
                continue
            if arrive_s[g, i] == 0.0 or flying[g, i]:
                lands_s[g, i] = arrive_s[g, i]
                # Links copy in order, so the last landing frees one.
                link_s[g] = max(link_s[g], arrive_s[g, i])
            first_s = min(first_s, lands_s[g, i])
            copy_s = min(copy_s, arrive_s[g, i])
        known[i] = _NOT_UNCACHED if first_s == 0.0 else _NOT_CACHED
        if first_s < np.inf or copy_s == np.inf:
            known[i] |= _FOR_GPU
        if cpu_s[i] == np.inf:
            known[i] |= _NOT_FOR_CPU


@compiled
def _skip(sequence: np.ndarray, known: np.ndarray, excluded: int, position: int) -> int:
    """First position from `position` on of whose expert nothing `excluded` is known."""
    while position < len(sequence) and known[sequence[position]] & excluded:
        position += 1
    return position


@compiled
def _next_on_gpu(
    falling: np.ndarray,
    known: np.ndarray,
    lands_s: np.ndarray,
    g: int,
    free_s: float,
    first: int,
) -> tuple[int, float]:
    """Expert that a GPU computes next, and its start: the highest load it holds, or
    what lands first; -1 if none. Before position `first` all are computed.
    """
    chosen = -1
    start_s = np.inf
    for n in range(first, len(falling)):
        i = falling[n]
        if known[i] & _DONE:
            continue
        begin_s = max(free_s, lands_s[g, i])
        if begin_s < start_s:
            chosen = i
            start_s = begin_s
            # Nothing starts earlier, and what follows has a lower load.
            if start_s == free_s:
                break
    return chosen, start_s


@compiled
def _key(soonest_end: bool, end_s: float, start_s: float) -> float:
    """What the next operation has least of."""
    return end_s if soonest_end else start_s


@compiled
def _next_link(
    link_s: np.ndarray, gpu_s: np.ndarray, arrive_s: np.ndarray, i: int
) -> int:
    """The link that is free first, of those that could bring an expert to some use."""
    chosen = -1
    for g in range(len(link_s)):
        comes = arrive_s[g, i] < np.inf and gpu_s[g, i] < np.inf
        if comes and (chosen < 0 or link_s[g] < link_s[chosen]):
            chosen = g
    return chosen


@compiled
def _next_operation(
    falling: np.ndarray,
    rising: np.ndarray,
    cpu_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    soonest_end: bool,
    stealing: bool,
    lands_s: np.ndarray,
    link_s: np.ndarray,
    gpu_end_s: np.ndarray,
    cpu_end_s: float,
    cpu_extra_s: float,
    known: np.ndarray,
    front: np.ndarray,
) -> tuple[int, int, int, float]:
    """The operation that comes next: its kind, GPU, expert and end; `_NONE` if nothing
    would ever end. Arguments as in `simulate`.
    """
    active = len(cpu_s)
    # Later lanes must beat the best so far strictly, so ties go to GPUs, then the CPU,
    # then links.
    key = np.inf
    kind = _NONE
    chosen = -1
    device = -1
    chosen_end_s = cpu_end_s

    front[_UNCOMPUTED] = _skip(falling, known, _DONE, front[_UNCOMPUTED])
    for g in range(len(gpu_s)):
        i, start_s = _next_on_gpu(
            falling, known, lands_s, g, gpu_end_s[g], front[_UNCOMPUTED]
        )
        end_s = start_s + gpu_s[g, i]
        earliest_s = _key(soonest_end, end_s, start_s)
        if i >= 0 and earliest_s < key:
            key = earliest_s
            kind = _GPU
            chosen = i
            device = g
            chosen_end_s = end_s

    front[_UNCACHED] = _skip(rising, known, _DONE | _NOT_UNCACHED, front[_UNCACHED])
    n = front[_UNCACHED]
    if stealing and n == active:
        front[_CACHED] = _skip(rising, known, _DONE | _NOT_CACHED, front[_CACHED])
        n = front[_CACHED]
    i = rising[min(n, active - 1)]
    end_s = cpu_end_s + cpu_s[i] + cpu_extra_s
    earliest_s = _key(soonest_end, end_s, cpu_end_s)
    if n < active and earliest_s < key:
        key = earliest_s
        kind = _CPU
        chosen = i
        chosen_end_s = end_s

    front[_COPIED] = _skip(falling, known, _DONE | _FOR_GPU, front[_COPIED])
    if front[_COPIED] < active:
        i = falling[front[_COPIED]]
        g = _next_link(link_s, gpu_s, arrive_s, i)
        end_s = link_s[g] + arrive_s[g, i]
        if _key(soonest_end, end_s, link_s[g]) < key:
            kind = _LINK
            chosen = i
            device = g
            chosen_end_s = end_s
    return kind, device, chosen, chosen_end_s


@compiled
def simulate(
    falling: np.ndarray,
    rising: np.ndarray,
    cpu_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    flying: np.ndarray,
    first_s: float,
    soonest_end: bool,
    stealing: bool,
    lands_s: np.ndarray,
    link_s: np.ndarray,
    gpu_end_s: np.ndarray,
    known: np.ndarray,
    front: np.ndarray,
    lanes: np.ndarray,
    order: np.ndarray,
) -> float:
    """Simulate the layer step, one operation at a time; the makespan.

    Args:
        falling: int64 [A], positions by descending load.
        rising: int64 [A], positions by ascending load.
        cpu_s: float64 [A].
        gpu_s: float64 [G, A].
        arrive_s: float64 [G, A]; of an absent expert, its copy alone.
        flying: bool [G, A], copies under way; their link is free when the last has
            landed.
        first_s: extra seconds of the first CPU expert.
        soonest_end: the operation that would end first comes next; else the one that
            would start first. Ties: GPUs, CPU, links.
        stealing: the CPU also takes what a GPU holds.
        lands_s: room for float64 [G, A].
        link_s: float64 [G], until each link has ended copies for other layers; changes.
        gpu_end_s: room for float64 [G].
        known: room for int8 [A].
        front: room for int64 [4], positions before which nothing is left.
        lanes: int8 [A], filled in.
        order: int64 [A], filled in: experts as they were given to a lane or a link.
    """
    active = len(cpu_s)
    _begin(
        cpu_s=cpu_s,
        gpu_s=gpu_s,
        arrive_s=arrive_s,
        flying=flying,
        lands_s=lands_s,
        link_s=link_s,
        known=known,
    )
    gpu_end_s[:] = 0.0
    # What was skipped once stays computed or taken, so no search begins anew.
    front[:] = 0
    ordered = 0
    cpu_end_s = 0.0
    cpu_extra_s = first_s

    remaining = active
    while remaining:
        kind, device, chosen, end_s = _next_operation(
            falling=falling,
            rising=rising,
            cpu_s=cpu_s,
            gpu_s=gpu_s,
            arrive_s=arrive_s,
            soonest_end=soonest_end,
            stealing=stealing,
            lands_s=lands_s,
            link_s=link_s,
            gpu_end_s=gpu_end_s,
            cpu_end_s=cpu_end_s,
            cpu_extra_s=cpu_extra_s,
            known=known,
            front=front,
        )
        if kind == _NONE:
            chosen = falling[front[_UNCOMPUTED]]

        # A fetched expert is ordered once, by its copy; when the GPU computes it later,
        # it has its position already.
        if not known[chosen] & _FETCHED:
            order[ordered] = chosen
            ordered += 1

        if kind == _LINK:
            link_s[device] = end_s
            lands_s[device, chosen] = end_s
            known[chosen] |= _FOR_GPU | _NOT_UNCACHED | _FETCHED
            continue

        remaining -= 1
        known[chosen] |= _DONE
        if kind == _GPU:
            gpu_end_s[device] = end_s
            lanes[chosen] = 1 + device
        else:
            cpu_end_s = end_s
            cpu_extra_s = 0.0
            lanes[chosen] = 0
    return max(cpu_end_s, gpu_end_s.max())


@compiled(
    nb.Several((LANES, ORDER, nb.float64))(
        EXPERT_IDS,
        SECONDS,
        SECONDS_BY_GPU,
        SECONDS_BY_GPU,
        input_array(nb.boolean, 2),
        SECONDS,
        nb.float64,
        nb.boolean,
        nb.boolean,
    )
)
def list_schedule(
    tokens: np.ndarray,
    cpu_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    flying: np.ndarray,
    busy_s: np.ndarray,
    first_s: float,
    soonest_end: bool,
    stealing: bool,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Simulate a layer step in arrays of its own: lanes int8 [A], the order int64 [A],
    and the makespan.

    Args: as in `simulate`; `tokens` int32 [A] are the loads, `busy_s` [G] stays as it
    is.
    """
    gpus, active = gpu_s.shape
    falling = np.empty(active, np.int64)
    rising = np.empty(active, np.int64)
    by_load(tokens, falling, rising)
    lanes = np.empty(active, np.int8)
    order = np.empty(active, np.int64)
    makespan_s = simulate(
        falling=falling,
        rising=rising,
        cpu_s=cpu_s,
        gpu_s=gpu_s,
        arrive_s=arrive_s,
        flying=flying,
        first_s=first_s,
        soonest_end=soonest_end,
        stealing=stealing,
        lands_s=np.empty((gpus, active)),
        link_s=busy_s.copy(),
        gpu_end_s=np.empty(gpus),
        known=np.empty(active, np.int8),
        front=np.empty(FRONTS, np.int64),
        lanes=lanes,
        order=order,
    )
    return lanes, order, makespan_s

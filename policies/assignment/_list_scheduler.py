"""HybriMoE's list scheduler: simulates a layer step on GPUs, CPU and links.

A active experts, G GPUs.
"""

from __future__ import annotations

import numpy as np
from numba import types as nb

from moesim.policies.compilation import (
    EXPERT_IDS,
    LANES,
    ORDER,
    SECONDS,
    SECONDS_BY_GPU,
    called,
)
from moesim.traces.compilation import compiled, input_array

# Kinds of operation that may come next.
_GPU = 0
_CPU = 1
_LINK = 2


@called
def _by_load(load: np.ndarray) -> np.ndarray:
    """Positions by ascending load, ties to the lower position: int64 [A]."""
    order = np.empty(len(load), np.int64)
    for i in range(len(load)):
        j = i
        while j > 0 and load[order[j - 1]] > load[i]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = i
    return order


@called
def _arrivals(
    arrive_s: np.ndarray,
    flying: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Residents and copies under way, when the layer step begins.

    Returns:
        when each GPU may start each expert (0 resident, inf not on its way), float64
        [G, A]; bool [A], which experts are on a GPU or bound for one; bool [A], which
        are on a GPU; and float64 [G], when each link is free.
    """
    gpus = len(arrive_s)
    active = arrive_s.shape[1]
    link_s = np.zeros(gpus)
    lands_s = np.full(arrive_s.shape, np.inf)
    at_gpu = np.zeros(active, np.bool_)
    resident = np.zeros(active, np.bool_)
    for i in range(active):
        for g in range(gpus):
            if arrive_s[g, i] == 0.0 or flying[g, i]:
                lands_s[g, i] = arrive_s[g, i]
                # Links copy in order, so the last landing frees one.
                link_s[g] = max(link_s[g], arrive_s[g, i])
        first_s = lands_s[:, i].min()
        at_gpu[i] = first_s < np.inf
        resident[i] = first_s == 0.0
    return lands_s, at_gpu, resident, link_s


@called
def _next_on_gpu(
    falling: np.ndarray,
    lanes: np.ndarray,
    lands_s: np.ndarray,
    free_s: float,
) -> tuple[int, float]:
    """Expert that a GPU computes next and its start: the highest load it holds, or what
    lands first; -1 if none.
    """
    chosen = -1
    start_s = np.inf
    for i in falling:
        if lanes[i] < 0 and max(free_s, lands_s[i]) < start_s:
            chosen = i
            start_s = max(free_s, lands_s[i])
            # Nothing starts earlier, and what follows has a lower load.
            if start_s == free_s:
                break
    return chosen, start_s


@called
def _skip(
    sequence: np.ndarray,
    lanes: np.ndarray,
    excluded: np.ndarray,
    position: int,
) -> int:
    """First position from `position` on whose expert is neither computed nor
    `excluded`.
    """
    while position < len(sequence) and (
        lanes[sequence[position]] >= 0 or excluded[sequence[position]]
    ):
        position += 1
    return position


@compiled(
    nb.Tuple((LANES, ORDER, nb.float64))(
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
    """Simulate the layer step, one operation at a time, and keep what was decided.

    Each GPU takes what it holds, highest load first; the CPU what no GPU holds, lowest
    load first, and when that has run out (and with `stealing`) the lowest load that a
    GPU holds; each link brings the highest load that no GPU holds. What lands joins the
    GPU's queue. What is in flight when the layer step begins stays in the CPU's reach
    until it is computed: the CPU need not wait for its landing. What the schedule
    itself copies does not: a copy is for its GPU.

    Args:
        tokens: int32 [A], the loads.
        cpu_s: float64 [A].
        gpu_s: float64 [G, A].
        arrive_s: float64 [G, A]; of an absent expert, its copy alone.
        flying: bool [G, A], copies under way; their link is free when the last has
            landed.
        busy_s: float64 [G], until each link has ended copies for other layers.
        first_s: extra seconds of the first CPU expert.
        soonest_end: the operation that would end first comes next; else the one that
            would start first. Ties: GPUs, CPU, links.
        stealing: see above.

    Returns:
        lanes int8 [A]; the order int64 [A] in which experts were given to a lane or a
        link; the makespan.

    Source: HybriMoE, section on scheduling; `reference/algorithms.md` §4.1 names the
    two readings R2 and R1.
    """
    gpus = len(gpu_s)
    active = len(cpu_s)
    falling = _by_load(-tokens)
    rising = _by_load(tokens)
    lands_s, at_gpu, resident, link_s = _arrivals(arrive_s, flying)
    link_s = np.maximum(link_s, busy_s)
    # Experts that the CPU does not take as uncached, and as cached ones.
    not_uncached = resident.copy()
    not_cached = ~resident
    fetched = np.zeros(active, np.bool_)
    lanes = np.full(active, -1, np.int8)
    order = np.empty(active, np.int64)
    ordered = 0
    gpu_end_s = np.zeros(gpus)
    cpu_end_s = 0.0
    cpu_extra_s = first_s

    # Positions in `rising`, `rising` and `falling` before which nothing is left: what
    # was skipped once stays computed or taken, so no search begins anew.
    uncached = 0
    cached = 0
    copied = 0

    remaining = active
    while remaining:
        # The best operation so far; later lanes must beat it strictly, so ties go to
        # GPUs, then the CPU, then links.
        key = np.inf
        kind = -1
        chosen = -1
        device = -1
        chosen_end_s = 0.0

        for g in range(gpus):
            i, start_s = _next_on_gpu(falling, lanes, lands_s[g], gpu_end_s[g])
            end_s = start_s + gpu_s[g, i]
            if i >= 0 and (end_s if soonest_end else start_s) < key:
                key = end_s if soonest_end else start_s
                kind = _GPU
                chosen = i
                device = g
                chosen_end_s = end_s

        uncached = _skip(rising, lanes, not_uncached, uncached)
        cached = _skip(rising, lanes, not_cached, cached) if stealing else active
        n = uncached if uncached < active else cached
        i = rising[min(n, active - 1)]
        end_s = cpu_end_s + cpu_s[i] + cpu_extra_s
        if n < active and (end_s if soonest_end else cpu_end_s) < key:
            key = end_s if soonest_end else cpu_end_s
            kind = _CPU
            chosen = i
            chosen_end_s = end_s

        copied = _skip(falling, lanes, at_gpu, copied)
        i = falling[min(copied, active - 1)]
        g = int(np.argmin(link_s))
        end_s = link_s[g] + arrive_s[g, i]
        if copied < active and (end_s if soonest_end else link_s[g]) < key:
            kind = _LINK
            chosen = i
            device = g
            chosen_end_s = end_s

        # A fetched expert is ordered once, by its copy; when the GPU computes it later,
        # it has its position already.
        if not fetched[chosen]:
            order[ordered] = chosen
            ordered += 1

        if kind == _LINK:
            link_s[device] = chosen_end_s
            lands_s[device, chosen] = chosen_end_s
            at_gpu[chosen] = True
            not_uncached[chosen] = True
            fetched[chosen] = True
            continue

        remaining -= 1
        if kind == _GPU:
            gpu_end_s[device] = chosen_end_s
            lanes[chosen] = 1 + device
        else:
            cpu_end_s = chosen_end_s
            cpu_extra_s = 0.0
            lanes[chosen] = 0
    return lanes, order, max(cpu_end_s, gpu_end_s.max())

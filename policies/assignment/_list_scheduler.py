"""HybriMoE's small simulation: a layer step is rehearsed before it happens.

Compiled ahead of the first call, like `policies/kernels.py`, from the raw arrays of
`LayerWork`.

A active experts, G GPUs.
"""

from __future__ import annotations

import numba
import numpy as np
from moesim.traces.compilation import compiled
from numba import types as nb


def _input(dtype: object, ndim: int = 1) -> nb.Array:
    """C-contiguous input; writable arrays are accepted too."""
    return nb.Array(dtype, ndim, "C", readonly=True)


_TIMES = _input(nb.float64)
_TIMES_G = _input(nb.float64, 2)
_GPU = 0
_CPU = 1
_LINK = 2


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def _on_the_way(
    arrive_s: np.ndarray, flying: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """When each GPU may start each expert (0 resident, inf not on its way), float64 [G,
    A].

    And bool [A]: which experts are on a GPU or bound for one; which are only bound for
    one. And float64 [G]: when each link is free.
    """
    link_s = np.zeros(len(arrive_s))
    lands_s = np.full(arrive_s.shape, np.inf)
    at_gpu = np.zeros(arrive_s.shape[1], np.bool_)
    promised = np.zeros(arrive_s.shape[1], np.bool_)
    for i in range(arrive_s.shape[1]):
        for g in range(len(arrive_s)):
            if arrive_s[g, i] == 0.0 or flying[g, i]:
                lands_s[g, i] = arrive_s[g, i]
                link_s[g] = max(link_s[g], arrive_s[g, i])
        at_gpu[i] = lands_s[:, i].min() < np.inf
        promised[i] = 0.0 < lands_s[:, i].min() < np.inf
    return lands_s, at_gpu, promised, link_s


@numba.njit(cache=True)
def _next_on_gpu(
    line: np.ndarray, lanes: np.ndarray, lands_s: np.ndarray, free_s: float
) -> tuple[int, float]:
    """Expert that a GPU computes next and its start: the highest load it holds, or what
    lands first; -1 if none.
    """
    found = -1
    start_s = np.inf
    for i in line:
        if lanes[i] < 0 and max(free_s, lands_s[i]) < start_s:
            found = i
            start_s = max(free_s, lands_s[i])
            if start_s == free_s:
                break
    return found, start_s


@numba.njit(cache=True)
def _skip(line: np.ndarray, lanes: np.ndarray, taken: np.ndarray, place: int) -> int:
    """First place from `place` on whose expert is neither computed nor `taken`."""
    while place < len(line) and (lanes[line[place]] >= 0 or taken[line[place]]):
        place += 1
    return place


@compiled(
    nb.Tuple((nb.int8[::1], nb.int64[::1], nb.float64))(
        _input(nb.int32),
        _TIMES,
        _TIMES_G,
        _TIMES_G,
        _input(nb.boolean, 2),
        nb.float64,
        nb.boolean,
        nb.boolean,
    )
)
def rehearse(
    tokens: np.ndarray,
    cpu_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    flying: np.ndarray,
    first_s: float,
    soonest_end: bool,
    stealing: bool,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Play the layer step through before it happens, one operation at a time, and keep
    what was decided.

    Each GPU takes what it holds, highest load first; the CPU what no GPU holds, lowest
    load first, and when that has run out (and with `stealing`) the lowest load that a
    GPU holds; each link brings the highest load that no GPU holds. What lands joins the
    GPU's queue, and is out of the CPU's reach from the start of its copy.

    Args:
        tokens: int32 [A], the loads.
        cpu_s: float64 [A].
        gpu_s: float64 [G, A].
        arrive_s: float64 [G, A].
        flying: bool [G, A], copies under way; their link is free when the last has
            landed.
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
    gpus, active = gpu_s.shape
    line = _by_load(-tokens)
    rising = _by_load(tokens)
    lands_s, at_gpu, promised, link_s = _on_the_way(arrive_s, flying)
    lanes = np.full(active, -1, np.int8)
    order = np.empty(active, np.int64)
    ordered = 0
    gpu_end_s = np.zeros(gpus)
    cpu_end_s = 0.0
    more_s = first_s
    # places of `rising`, `rising` and `line` behind which to look
    uncached = 0
    cached = 0
    copied = 0
    left = active
    while left:
        key = np.inf
        kind = -1
        chosen = -1
        place = -1
        chosen_end_s = 0.0
        for g in range(gpus):
            i, start_s = _next_on_gpu(line, lanes, lands_s[g], gpu_end_s[g])
            end_s = start_s + gpu_s[g, i]
            if i >= 0 and (end_s if soonest_end else start_s) < key:
                key = end_s if soonest_end else start_s
                kind = _GPU
                chosen = i
                place = g
                chosen_end_s = end_s
        uncached = _skip(rising, lanes, at_gpu, uncached)
        cached = _skip(rising, lanes, promised, cached) if stealing else active
        copied = _skip(line, lanes, at_gpu, copied)
        n = uncached if uncached < active else cached
        i = rising[min(n, active - 1)]
        end_s = cpu_end_s + cpu_s[i] + more_s
        if n < active and (end_s if soonest_end else cpu_end_s) < key:
            key = end_s if soonest_end else cpu_end_s
            kind = _CPU
            chosen = i
            chosen_end_s = end_s
        i = line[min(copied, active - 1)]
        g = int(np.argmin(link_s))
        end_s = link_s[g] + arrive_s[g, i]
        if copied < active and (end_s if soonest_end else link_s[g]) < key:
            kind = _LINK
            chosen = i
            place = g
            chosen_end_s = end_s
        if kind == _LINK or not promised[chosen] or flying[:, chosen].any():
            order[ordered] = chosen
            ordered += 1
        if kind == _LINK:
            link_s[place] = lands_s[place, chosen] = chosen_end_s
            at_gpu[chosen] = promised[chosen] = True
            continue
        left -= 1
        if kind == _GPU:
            gpu_end_s[place] = chosen_end_s
            lanes[chosen] = 1 + place
        else:
            cpu_end_s = chosen_end_s
            more_s = 0.0
            lanes[chosen] = 0
    return lanes, order, max(cpu_end_s, gpu_end_s.max())

"""The loops behind bounds, with C types."""

from __future__ import annotations

from math import inf

import numpy as np

# -- makespans -------------------------------------------------------------------------


def least_of_steps(
    edges: np.ndarray,
    cpu_s: np.ndarray,
    gpu_s: np.ndarray,
    firsts_s: np.ndarray,
    back_s: np.ndarray,
    further_s: np.ndarray,
) -> tuple[float, int, int]:
    """The least makespans of many layer steps added up, how many accesses the CPU
    computes in them, and what each further one costs.
    """
    most = 0
    for s in range(len(edges) - 1):
        most = max(most, edges[s + 1] - edges[s])
    values = np.empty(most + 1)
    orders = np.empty((3, most + 1), np.int64)
    least = np.empty(most + 1)
    total_s = 0.0
    free = 0
    count = 0
    for s in range(len(edges) - 1):
        begin = edges[s]
        end = edges[s + 1]
        least_s = least[: end - begin + 1]
        _fill_makespans(
            cpu_s[begin:end],
            gpu_s[begin:end],
            firsts_s,
            back_s[s],
            values,
            orders,
            least_s,
        )
        best = 0
        for m in range(1, len(least_s)):
            if least_s[m] <= least_s[best]:
                best = m
        total_s += least_s[best]
        free += best
        for m in range(best + 1, len(least_s)):
            further_s[count] = least_s[m] - least_s[m - 1]
            count += 1
    return total_s, free, count


def least_makespans(
    cpu_s: np.ndarray, gpu_s: np.ndarray, firsts_s: np.ndarray, back_s: float
) -> np.ndarray:
    """Least seconds of one layer step's experts if the CPU computes 0, 1, ... of them:
    float64 [A + 1], convex.

    Neither lane is faster than with the experts that take it least. Nor do both
    together beat the best trade: an expert counts by what it takes on either lane, at
    the prices at which the least makespan of divisible experts cuts one.

    Args:
        cpu_s: float64 [A], on the CPU.
        gpu_s: float64 [A], on the GPUs together.
        firsts_s: float64 [2], what the first expert on either takes beyond that.
        back_s: what results of the CPU take to a GPU.
    """
    count = len(cpu_s) + 1
    least_s = np.empty(count)
    orders = np.empty((3, count), np.int64)
    _fill_makespans(cpu_s, gpu_s, firsts_s, back_s, np.empty(count), orders, least_s)
    return least_s


def _fill_makespans(
    cpu_s: np.ndarray,
    gpu_s: np.ndarray,
    firsts_s: np.ndarray,
    back_s: float,
    values: np.ndarray,
    orders: np.ndarray,
    least_s: np.ndarray,
) -> None:
    """Fill in `least_makespans`; `values` and `orders` are for its work."""
    active = len(cpu_s)
    by_trade = orders[0]
    by_cpu = orders[1]
    by_gpu = orders[2]
    price = _cpu_price(cpu_s, gpu_s, values, by_trade)
    for i in range(active):
        values[i] = price * cpu_s[i] - (1.0 - price) * gpu_s[i]
    _sort(values, active, by_trade)
    _sort(cpu_s, active, by_cpu)
    _sort(gpu_s, active, by_gpu)
    on_cpu_s = 0.0
    on_gpu_s = 0.0
    for i in range(active):
        on_gpu_s += gpu_s[i]
    traded_s = (1.0 - price) * on_gpu_s
    for m in range(active + 1):
        cpu_first_s = 0.0
        gpu_first_s = firsts_s[1]
        after_s = 0.0
        if m > 0:
            on_cpu_s += cpu_s[by_cpu[m - 1]]
            on_gpu_s -= gpu_s[by_gpu[active - m]]
            traded_s += values[by_trade[m - 1]]
            cpu_first_s = firsts_s[0]
            after_s = back_s
        if m == active:
            on_gpu_s = 0.0
            gpu_first_s = 0.0
        either_s = max(cpu_first_s + on_cpu_s, gpu_first_s + on_gpu_s)
        both_s = price * cpu_first_s + (1.0 - price) * gpu_first_s + traded_s
        least_s[m] = max(either_s, both_s) + after_s
    _make_convex(least_s, by_trade)


def _sort(values: np.ndarray, count: int, order: np.ndarray) -> None:
    """Fill `order` with the places of so many values, the least first, equal ones in
    their order: by insertion, as a layer step has few.
    """
    for i in range(count):
        place = i
        while place > 0 and values[order[place - 1]] > values[i]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = i


def _cpu_price(
    cpu_s: np.ndarray, gpu_s: np.ndarray, ratios: np.ndarray, order: np.ndarray
) -> float:
    """Return what a second on the CPU counts, and one on the GPU the rest, where the
    least makespan of divisible experts cuts one (fractional knapsack).
    """
    on_cpu_s = 0.0
    on_gpu_s = 0.0
    for i in range(len(cpu_s)):
        on_gpu_s += gpu_s[i]
        ratios[i] = cpu_s[i] / gpu_s[i] if gpu_s[i] > 0 else inf
    _sort(ratios, len(cpu_s), order)
    for n in range(len(cpu_s)):
        i = order[n]
        on_cpu_s += cpu_s[i]
        on_gpu_s -= gpu_s[i]
        if on_cpu_s >= on_gpu_s:
            return gpu_s[i] / (cpu_s[i] + gpu_s[i])
    return 1.0


def _make_convex(values: np.ndarray, corners: np.ndarray) -> None:
    """Lower values to the largest convex function below them; `corners` is for its
    work.
    """
    count = 0
    for i in range(len(values)):
        while count > 1:
            last = corners[count - 1]
            before = corners[count - 2]
            rise = (values[i] - values[before]) * (last - before)
            if (values[last] - values[before]) * (i - before) < rise:
                break
            count -= 1
        corners[count] = i
        count += 1
    for c in range(count - 1):
        begin = corners[c]
        end = corners[c + 1]
        slope = (values[end] - values[begin]) / (end - begin)
        for i in range(begin + 1, end):
            values[i] = values[begin] + slope * (i - begin)


# -- reads -----------------------------------------------------------------------------


def count_misses(edges: np.ndarray, keys: np.ndarray, size: int) -> int:
    """As `moesim.runs.bound.min_with_bypass`; keys are numbers from 0 on."""
    steps = len(edges) - 1
    uses = len(keys)
    experts = 0
    for a in range(uses):
        experts = max(experts, keys[a] + 1)
    following = np.empty(uses, np.int64)
    next_step = np.full(experts, steps)
    for n in range(steps):
        at = steps - 1 - n
        for a in range(edges[at], edges[at + 1]):
            following[a] = next_step[keys[a]]
        for a in range(edges[at], edges[at + 1]):
            next_step[keys[a]] = at

    # Step of the next use of what is cached, -1 of what is not.
    cached = np.full(experts, -1)
    held = 0
    missed = 0
    # A heap, latest use first. An entry is stale once its expert was used again.
    heap_step = np.empty(uses, np.int64)
    heap_key = np.empty(uses, np.int64)
    entries = 0
    for at in range(steps):
        for a in range(edges[at], edges[at + 1]):
            key = keys[a]
            if cached[key] < 0:
                missed += 1
                held += 1
            cached[key] = following[a]
            _push(heap_step, heap_key, entries, following[a], key)
            entries += 1
        while held > size:
            latest = heap_step[0]
            victim = heap_key[0]
            entries -= 1
            _pop(heap_step, heap_key, entries)
            if cached[victim] == latest:
                cached[victim] = -1
                held -= 1
    return missed


def _push(
    heap_step: np.ndarray, heap_key: np.ndarray, entries: int, step: int, key: int
) -> None:
    """Add an entry to a heap of so many."""
    place = entries
    while place and heap_step[(place - 1) // 2] < step:
        above = (place - 1) // 2
        heap_step[place] = heap_step[above]
        heap_key[place] = heap_key[above]
        place = above
    heap_step[place] = step
    heap_key[place] = key


def _pop(heap_step: np.ndarray, heap_key: np.ndarray, entries: int) -> None:
    """Drop the first entry of a heap that keeps so many."""
    step = heap_step[entries]
    key = heap_key[entries]
    place = 0
    while 2 * place + 1 < entries:
        below = 2 * place + 1
        if below + 1 < entries and heap_step[below + 1] > heap_step[below]:
            below += 1
        if heap_step[below] <= step:
            break
        heap_step[place] = heap_step[below]
        heap_key[place] = heap_key[below]
        place = below
    heap_step[place] = step
    heap_key[place] = key

"""The exact solver's inner loop: grow the frontier of partial schedules, and drop what cannot win.

A partial schedule is a row of clocks: the CPU's, and for each GPU the compute queued on it, its link's,
and that of its arrivals. Experts are added one by one in a fixed order, each on every lane. A row that is
later in every clock than another can be forgotten (whatever follows, it stays behind), and so can one
whose clocks, weighted by fixed prices and completed with each coming expert's cheapest lane, already reach
the best makespan known (a Lagrangian bound). What is left is small on real layers, whose costs
take few distinct values.

A active experts, G GPUs, C = 1 + 3 G clocks (CPU; of each GPU: compute, link, arrivals), R = 1 + 2 G priced
resources (CPU; of each GPU: compute, link), M rows of prices, N rows of clocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numba import types as nb

from policies.kernels import compiled, inlined

_TOLERANCE = 1e-10
"""Relative improvement that is not worth looking for."""

_FIRST_ROWS, _MOST_ROWS = 64, 1 << 15
"""Rows kept at a time in the first, quick pass and in the second."""

_NEIGHBOURS = 24
"""Kept rows with which a new one is compared; more prunes better, fewer is faster."""

_MIXES = 5
"""Shares of link and compute in a GPU's price that are tried."""


class Layer(NamedTuple):
    """A layer step as the solver sees it: experts are launched in `order`; links and arrivals keep it.

    Attributes:
        cpu_s: float64 [A] on the CPU.
        gpu_s: float64 [G, A] on each GPU once there.
        copy_s: float64 [G, A] on the link; 0 if no copy is needed.
        landing_s: float64 [G, A] landing of a copy in flight; 0 if there is none.
        link_s: float64 [G] from when each link is free.
        first_s: extra seconds of the first CPU expert.
        order: int64 [A].
    """

    cpu_s: np.ndarray
    gpu_s: np.ndarray
    copy_s: np.ndarray
    landing_s: np.ndarray
    link_s: np.ndarray
    first_s: float
    order: np.ndarray


_LAYER = nb.NamedTuple(
    (nb.float64[::1], nb.float64[:, ::1], nb.float64[:, ::1], nb.float64[:, ::1], nb.float64[::1], nb.float64,
     nb.int64[::1]),
    Layer,
)  # fmt: skip


@inlined
def _advance(clocks: np.ndarray, lane: int, i: int, layer: Layer, result: np.ndarray) -> None:
    """Write to `result` the `clocks`, float64 [C], after expert `i` has been put on `lane`."""
    for k in range(len(clocks)):
        result[k] = clocks[k]
    if lane == 0:
        result[0] += layer.cpu_s[i] if clocks[0] > 0.0 else layer.first_s + layer.cpu_s[i]
    else:
        g, at = lane - 1, 3 * lane - 2
        compute_s = layer.gpu_s[g, i]
        if layer.copy_s[g, i] > 0.0:
            result[at + 1] += layer.copy_s[g, i]
            result[at + 2] = max(result[at + 2], result[at + 1]) + compute_s
        elif layer.landing_s[g, i] > 0.0:
            result[at + 2] = max(result[at + 2], layer.landing_s[g, i]) + compute_s
        result[at] += compute_s


@inlined
def _makespan_s(clocks: np.ndarray) -> float:
    """End of the last computation; a link alone delays nobody."""
    end_s = clocks[0]
    for at in range(1, len(clocks), 3):
        end_s = max(end_s, clocks[at], clocks[at + 2])
    return end_s


@numba.njit(cache=True)
def _loads(layer: Layer, share: np.ndarray, mix: float, load: np.ndarray) -> float:
    """Fill `load`, float64 [1 + G], with each expert on its cheapest lane; return what they cost together.

    A GPU's second is `mix` link and the rest compute; a second on lane d costs ``share[d]``.
    """
    total = 0.0
    load[:] = 0.0
    for i in range(len(layer.cpu_s)):
        lane, added = 0, layer.cpu_s[i]
        best = share[0] * added
        for g in range(len(layer.gpu_s)):
            seconds = (1.0 - mix) * layer.gpu_s[g, i] + mix * layer.copy_s[g, i]
            if share[g + 1] * seconds < best:
                best, lane, added = share[g + 1] * seconds, g + 1, seconds
        load[lane] += added
        total += best
    return total


@numba.njit(cache=True)
def _balance(layer: Layer, mix: float) -> np.ndarray:
    """Price of each lane, float64 [1 + G], sum 1: between each pair of lanes, bisect until their loads balance.

    With one GPU that is the optimal dual solution of the mix.
    """
    lanes = len(layer.gpu_s) + 1
    share, load = np.full(lanes, 1.0 / lanes), np.empty(lanes)
    for _ in range(1 if lanes == 2 else 3):
        for a in range(lanes - 1):
            for b in range(a + 1, lanes):
                both, low, high = share[a] + share[b], 0.0, 1.0
                for _ in range(24):
                    middle = 0.5 * (low + high)
                    share[a] = both * middle
                    share[b] = both - share[a]
                    _loads(layer, share, mix, load)
                    if load[a] > load[b]:
                        low = middle
                    else:
                        high = middle
    return share


@compiled(nb.Tuple((nb.float64[:, ::1], nb.float64[::1]))(_LAYER))
def prices(layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    """Price the resources so that the priced work bounds the makespan from below, for several mixes.

    Returns:
        prices float64 [M, R], each row summing to 1; and by how much an expert's two cheapest lanes
        differ in the first row's prices, float64 [A].
    """
    gpus, active = layer.gpu_s.shape
    mixes = _MIXES if layer.copy_s.max() > 0.0 else 1
    found, regret = np.zeros((mixes, 1 + 2 * gpus)), np.empty(active)
    for m in range(mixes):
        mix = m / (_MIXES - 1)
        share = _balance(layer, mix)
        found[m, 0] = share[0]
        for g in range(gpus):
            found[m, 1 + 2 * g], found[m, 2 + 2 * g] = share[g + 1] * (1.0 - mix), share[g + 1] * mix
    for i in range(active):
        best, second = found[0, 0] * layer.cpu_s[i], np.inf
        for g in range(gpus):
            cost = found[0, 1 + 2 * g] * layer.gpu_s[g, i]
            best, second = min(best, cost), min(second, max(best, cost))
        regret[i] = second - best
    return found, regret


@numba.njit(cache=True)
def _rest(layer: Layer, price: np.ndarray) -> np.ndarray:
    """Priced cost of the experts ``order[n:]``, each on its cheapest lane: float64 [M, A + 1]."""
    gpus, active = layer.gpu_s.shape
    rest = np.zeros((len(price), active + 1))
    for m in range(len(price)):
        for n in range(active - 1, -1, -1):
            i = layer.order[n]
            least = price[m, 0] * layer.cpu_s[i]
            for g in range(gpus):
                cost = price[m, 1 + 2 * g] * layer.gpu_s[g, i] + price[m, 2 + 2 * g] * layer.copy_s[g, i]
                least = min(least, cost)
            rest[m, n] = rest[m, n + 1] + least
    return rest


@numba.njit(cache=True)
def _first_answer(layer: Layer, start: np.ndarray, lanes: np.ndarray) -> float:
    """Put each expert, in order, on the lane that would end first; fill `lanes` and return the makespan."""
    clocks, child = start.copy(), np.empty(len(start))
    for i in layer.order:
        end_s = np.inf
        for lane in range(len(layer.gpu_s), -1, -1):
            _advance(clocks, lane, i, layer, child)
            lane_s = child[0] if lane == 0 else max(child[3 * lane - 2], child[3 * lane])
            if lane_s < end_s:
                lanes[i], end_s = lane, lane_s
        _advance(clocks, lanes[i], i, layer, child)
        clocks[:] = child
    return _makespan_s(clocks)


@inlined
def _least_s(child: np.ndarray, layer: Layer, price: np.ndarray, rest: np.ndarray, n: int) -> float:
    """A lower bound of every makespan that starts with the clocks `child` of the first `n` experts."""
    least_s = _makespan_s(child)
    for m in range(len(price)):
        value = rest[m, n] + price[m, 0] * child[0]
        for g in range(len(layer.link_s)):
            value += price[m, 1 + 2 * g] * child[1 + 3 * g]
            value += price[m, 2 + 2 * g] * (child[2 + 3 * g] - layer.link_s[g])
        least_s = max(least_s, value)
    return least_s


@inlined
def _beaten(child: np.ndarray, rows: np.ndarray, kept: int, slack_s: float) -> bool:
    """Whether one of the last kept rows is, but for `slack_s`, ahead in every clock; the CPU's always is."""
    for j in range(kept - 1, max(-1, kept - 1 - _NEIGHBOURS), -1):
        ahead = True
        for k in range(1, len(child)):
            if rows[j, k] > child[k] + slack_s:
                ahead = False
                break
        if ahead:
            return True
    return False


@numba.njit(cache=True)
def _level(
    layer: Layer, n: int, settled: np.ndarray, price: np.ndarray, rest: np.ndarray, best_s: float, slack_s: float,
    rows: np.ndarray, origin: np.ndarray, count: int, above: np.ndarray, above_origin: np.ndarray,
    tree: np.ndarray, nodes: int,
) -> tuple[int, int, np.ndarray]:  # fmt: skip
    """Put expert ``order[n]`` on every lane of every row, in ascending CPU clock, and keep what may still win.

    Where `settled`, no resident follows on a GPU: arrivals and the rest share its compute, so both clocks become one.

    Returns:
        rows kept (-1 if they do not fit), nodes of the tree of decisions, and the tree, perhaps a larger one.
    """
    i, lanes = layer.order[n], len(layer.link_s) + 1
    at, child = np.zeros(lanes, np.int64), np.empty(rows.shape[1])
    kept = 0
    while True:
        lane, first = -1, np.inf
        for k in range(lanes):
            if at[k] < count:
                clock = rows[at[k], 0]
                if k == 0:
                    clock += layer.cpu_s[i] if clock > 0.0 else layer.first_s + layer.cpu_s[i]
                if clock < first:
                    lane, first = k, clock
        if lane < 0:
            return kept, nodes, tree
        parent = at[lane]
        at[lane] += 1
        _advance(rows[parent], lane, i, layer, child)
        for g in range(lanes - 1):
            if settled[g]:
                child[1 + 3 * g] = child[3 + 3 * g] = max(child[1 + 3 * g], child[3 + 3 * g])
        if _least_s(child, layer, price, rest, n + 1) >= best_s * (1.0 - _TOLERANCE):
            continue
        if _beaten(child, above, kept, slack_s):
            continue
        if kept == len(above):
            return -1, nodes, tree
        if nodes == len(tree):
            grown = np.empty((2 * nodes, 2), np.int64)
            grown[:nodes] = tree
            tree = grown
        tree[nodes, 0], tree[nodes, 1] = origin[parent], lane
        above[kept], above_origin[kept] = child, nodes
        nodes += 1
        kept += 1


@compiled(nb.Tuple((nb.int8[::1], nb.float64, nb.float64))(_LAYER, nb.float64[:, ::1]))
def frontier(layer: Layer, price: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Find the lanes with the smallest makespan.

    A first pass keeps few rows; where they do not fit, rows that are almost beaten go too, and the slack is
    added up. Only if it had to do that, a second pass with room for many follows.

    Args:
        layer: costs and launch order.
        price: float64 [M, R] of `prices`; any prices are valid, good ones are fast.

    Returns:
        lanes int8 [A], their makespan, and a proven lower bound of every makespan: equal to it (which a
        relative 1e-10 may still beat) unless the second pass needed slack too.
    """
    gpus, active = layer.gpu_s.shape
    start, lanes, rest = np.zeros(1 + 3 * gpus), np.zeros(active, np.int8), _rest(layer, price)
    settled = np.ones((active, gpus), np.bool_)
    for g in range(gpus):
        start[2 + 3 * g] = layer.link_s[g]
        for n in range(active - 1, 0, -1):
            i = layer.order[n]
            settled[n - 1, g] = settled[n, g] and (layer.copy_s[g, i] > 0.0 or layer.landing_s[g, i] > 0.0)
    best_s = bound_s = _first_answer(layer, start, lanes)
    for limit in (_FIRST_ROWS, _MOST_ROWS):
        rows, above = np.empty((limit, len(start))), np.empty((limit, len(start)))
        origin, above_origin = np.empty(limit, np.int64), np.empty(limit, np.int64)
        tree = np.empty((1024, 2), np.int64)  # parent and lane of every row that was ever kept
        rows[0], origin[0], count, nodes, slack_s, lost_s = start, -1, 1, 0, 0.0, 0.0
        for n in range(active):
            kept, after, tree = _level(
                layer, n, settled[n], price, rest, best_s, slack_s, rows, origin, count, above, above_origin, tree, nodes
            )
            while kept < 0:
                slack_s = max(2.0 * slack_s, 1e-6 * best_s)
                kept, after, tree = _level(
                    layer, n, settled[n], price, rest, best_s, slack_s, rows, origin, count, above, above_origin, tree,
                    nodes,
                )  # fmt: skip
            nodes, count = after, kept
            lost_s += slack_s
            slack_s *= 0.5
            rows, above, origin, above_origin = above, rows, above_origin, origin
        for j in range(count):
            if _makespan_s(rows[j]) < best_s:
                best_s = _makespan_s(rows[j])
                node = origin[j]
                for n in range(active - 1, -1, -1):
                    lanes[layer.order[n]] = tree[node, 1]
                    node = tree[node, 0]
        bound_s = best_s - lost_s
        if lost_s == 0.0:
            break
    return lanes, best_s, max(bound_s, rest[:, 0].max())

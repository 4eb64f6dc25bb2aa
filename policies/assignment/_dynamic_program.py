"""The exact solver's inner loop: grow the frontier of partial schedules, and drop what
cannot win.

A partial schedule is a row of clocks: the CPU's, and for each GPU the compute queued on
it, its link's, and that of its arrivals. Experts are added one by one in a fixed order,
each on every lane. A row that is later in every clock than another can be forgotten
(whatever follows, it stays behind), and so can one whose clocks, weighted by fixed
prices and completed with each coming expert's cheapest lane, already reach the best
makespan known (a Lagrangian bound). What is left is small on real layers, whose costs
take few distinct values.

A active experts, G GPUs, C = 1 + 3 G clocks (CPU; of each GPU: compute, link,
arrivals), R = 1 + 2 G priced resources (CPU; of each GPU: compute, link), M rows of
prices, N rows of clocks.
"""

from __future__ import annotations

import numba
import numpy as np
from moesim.policies.assignment._lagrangian_bounds import LAYER, Layer
from moesim.policies.kernels import inlined
from moesim.traces.compilation import compiled
from numba import types as nb

_TOLERANCE = 1e-10
"""Relative improvement that is not worth looking for."""

_NOISE = 1e-13
"""Relative difference of two clocks that rounding alone explains."""

_FIRST_ROWS = 64
_MOST_ROWS = 1 << 13
"""Rows kept at a time in the first, quick pass and in the second."""

_NEIGHBOURS = 24
_MANY_NEIGHBOURS = 384
"""Kept rows with which a new one is compared, with one GPU and with several; more
prunes better, fewer is faster.
"""


@inlined
def _advance(
    clocks: np.ndarray, lane: int, i: int, layer: Layer, result: np.ndarray
) -> None:
    """Write to `result` the `clocks`, float64 [C], after expert `i` has been put on
    `lane`.
    """
    for k in range(len(clocks)):
        result[k] = clocks[k]
    if lane == 0:
        result[0] += (
            layer.cpu_s[i] if clocks[0] > 0.0 else layer.first_s + layer.cpu_s[i]
        )
    else:
        g = lane - 1
        at = 3 * lane - 2
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
def _first_answer(layer: Layer, start: np.ndarray, lanes: np.ndarray) -> float:
    """Put each expert, in order, on the lane that would end first; fill `lanes` and
    return the makespan.
    """
    clocks = start.copy()
    child = np.empty(len(start))
    for i in layer.order:
        end_s = np.inf
        for lane in range(len(layer.gpu_s), -1, -1):
            _advance(clocks, lane, i, layer, child)
            lane_s = (
                child[0] if lane == 0 else max(child[3 * lane - 2], child[3 * lane])
            )
            if lane_s < end_s:
                lanes[i] = lane
                end_s = lane_s
        _advance(clocks, lanes[i], i, layer, child)
        clocks[:] = child
    return _makespan_s(clocks)


@inlined
def _least_s(
    child: np.ndarray, layer: Layer, price: np.ndarray, rest: np.ndarray, n: int
) -> float:
    """A lower bound of every makespan that starts with the clocks `child` of the first
    `n` experts.
    """
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
    """Whether one of the last kept rows is, but for `slack_s`, ahead in every clock;
    the CPU's always is.
    """
    neighbours = _NEIGHBOURS if len(child) == 4 else _MANY_NEIGHBOURS
    for j in range(kept - 1, max(-1, kept - 1 - neighbours), -1):
        ahead = True
        for k in range(1, len(child)):
            if rows[j, k] > child[k] + slack_s:
                ahead = False
                break
        if ahead:
            return True
    return False


@inlined
def _next_lane(
    layer: Layer, i: int, rows: np.ndarray, count: int, at: np.ndarray
) -> int:
    """Lane whose next row, ``at[lane]``, has the earliest CPU clock once expert `i` is
    on it; -1 after the last.
    """
    found = -1
    first = np.inf
    for lane in range(len(at)):
        clock = rows[at[lane], 0] if at[lane] < count else np.inf
        if lane == 0:
            clock += layer.cpu_s[i] if clock > 0.0 else layer.first_s + layer.cpu_s[i]
        if clock < first:
            found = lane
            first = clock
    return found


@numba.njit(cache=True)
def _level(
    layer: Layer,
    n: int,
    settled: np.ndarray,
    price: np.ndarray,
    rest: np.ndarray,
    best_s: float,
    slack_s: float,
    rows: np.ndarray,
    origin: np.ndarray,
    count: int,
    above: np.ndarray,
    above_origin: np.ndarray,
    tree: np.ndarray,
    nodes: int,
) -> tuple[int, int, np.ndarray]:
    """Put expert ``order[n]`` on every lane of every row, in ascending CPU clock, and
    keep what may still win.

    Where `settled`, no resident follows on a GPU: arrivals and the rest share its
    compute, so both clocks become one.

    Returns:
        rows kept (-1 if they do not fit), nodes of the tree of decisions, and the tree,
        perhaps a larger one.
    """
    i = layer.order[n]
    lanes = len(layer.link_s) + 1
    at = np.zeros(lanes, np.int64)
    child = np.empty(rows.shape[1])
    kept = 0
    while True:
        lane = _next_lane(layer, i, rows, count, at)
        if lane < 0:
            return kept, nodes, tree
        parent = at[lane]
        at[lane] += 1
        _advance(rows[parent], lane, i, layer, child)
        for g in range(lanes - 1):
            if settled[g]:
                child[1 + 3 * g] = child[3 + 3 * g] = max(
                    child[1 + 3 * g], child[3 + 3 * g]
                )
        if _least_s(child, layer, price, rest, n + 1) >= best_s * (1.0 - _TOLERANCE):
            continue
        if _beaten(child, above, kept, slack_s + _NOISE * best_s):
            continue
        if kept == len(above):
            return -1, nodes, tree
        if nodes == len(tree):
            grown = np.empty((2 * nodes, 2), np.int64)
            grown[:nodes] = tree
            tree = grown
        tree[nodes, 0] = origin[parent]
        tree[nodes, 1] = lane
        above[kept] = child
        above_origin[kept] = nodes
        nodes += 1
        kept += 1


@numba.njit(cache=True)
def _settled(layer: Layer) -> np.ndarray:
    """From which place of the order on nothing that follows is resident on a GPU: bool
    [A, G].
    """
    gpus, active = layer.gpu_s.shape
    settled = np.ones((active, gpus), np.bool_)
    for n in range(active - 1, 0, -1):
        i = layer.order[n]
        for g in range(gpus):
            settled[n - 1, g] = settled[n, g] and (
                layer.copy_s[g, i] > 0.0 or layer.landing_s[g, i] > 0.0
            )
    return settled


@compiled(
    nb.Tuple((nb.int8[::1], nb.float64, nb.float64))(
        LAYER, nb.float64[:, ::1], nb.float64[:, ::1]
    )
)
def frontier(
    layer: Layer, price: np.ndarray, rest: np.ndarray
) -> tuple[np.ndarray, float, float]:
    """Find the lanes with the smallest makespan.

    A first pass keeps few rows; where they do not fit, rows that are almost beaten go
    too, and the slack is added up. Only if it had to do that, a second pass with room
    for many follows.

    Args:
        layer: costs and launch order.
        price: float64 [M, R] of `prices`; any prices are valid, good ones are fast.
        rest: float64 [M, A + 1] of `priced_rest`, for the same prices and order.

    Returns:
        lanes int8 [A], their makespan, and a proven lower bound of every makespan:
        equal to it (which a relative 1e-10 may still beat) unless the second pass
        needed slack too.
    """
    gpus, active = layer.gpu_s.shape
    start = np.zeros(1 + 3 * gpus)
    lanes = np.zeros(active, np.int8)
    for g in range(gpus):
        start[2 + 3 * g] = layer.link_s[g]
    settled = _settled(layer)
    best_s = bound_s = _first_answer(layer, start, lanes)
    for limit in (_FIRST_ROWS, _MOST_ROWS // gpus**2):
        rows = np.empty((limit, len(start)))
        above = np.empty((limit, len(start)))
        origin = np.empty(limit, np.int64)
        above_origin = np.empty(limit, np.int64)
        # Parent and lane of every row that was ever kept.
        tree = np.empty((1024, 2), np.int64)
        rows[0] = start
        origin[0] = -1
        count = 1
        nodes = 0
        slack_s = 0.0
        lost_s = 0.0
        for n in range(active):
            kept = -1
            after = nodes
            while kept < 0:
                kept, after, tree = _level(
                    layer,
                    n,
                    settled[n],
                    price,
                    rest,
                    best_s,
                    slack_s,
                    rows,
                    origin,
                    count,
                    above,
                    above_origin,
                    tree,
                    nodes,
                )
                if kept < 0:
                    slack_s = max(2.0 * slack_s, 1e-6 * best_s)
            nodes = after
            count = kept
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

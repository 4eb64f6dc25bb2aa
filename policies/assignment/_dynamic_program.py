"""Exact dynamic program over partial schedules of a layer step, with pruning.

A partial schedule is a row of clocks: the CPU's, and for each GPU the compute queued on
it, its link's, and that of its arrivals. Experts are added one by one in a fixed order,
each on every lane. Two rules prune the rows. A row that is later in every clock than
another can be forgotten: whatever follows, it stays behind. So can a row whose clocks,
weighted by fixed prices and completed with each coming expert's cheapest lane, already
reach the best makespan known (a Lagrangian bound). What is left is small on real
layers, whose costs take few distinct values.

The prices are Lagrange multipliers: give a second on the CPU, on a GPU and on a link
fixed prices that sum to one. A schedule's makespan is then at least the priced cost of
its work, and that is at least the sum of every expert's cost on its cheapest lane. Good
prices are those that make this bound large: there, the lanes are balanced.

A active experts, G GPUs, C = 1 + 3 G clocks (CPU; of each GPU: compute, link,
arrivals), R = 1 + 2 G priced resources (CPU; of each GPU: compute, link), M rows of
prices, N rows of clocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled, structure
from moesim.policies.kernels import SECONDS

# Shares of link and compute in a GPU's price that are tried.
_MIXES = 5

# Halvings of the interval in which two lanes' balance is sought.
_BISECTIONS = 24


class Layer(NamedTuple):
    """A layer step as the solver sees it: experts are launched in `order`; links and
    arrivals keep it.

    One more array in here makes the dynamic program a tenth slower (measured).

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


LAYER = structure(
    Layer,
    (
        nb.float64[::1],
        nb.float64[:, ::1],
        nb.float64[:, ::1],
        nb.float64[:, ::1],
        nb.float64[::1],
        nb.float64,
        nb.int64[::1],
    ),
)


@compiled
def _loads(
    layer: Layer,
    share: np.ndarray,
    mix: float,
    load: np.ndarray,
) -> float:
    """Fill `load`, float64 [1 + G], with each expert on its cheapest lane; return what
    they cost together.

    A GPU's second is `mix` link and the rest compute; a second on lane d costs
    ``share[d]``.
    """
    total = 0.0
    load[:] = 0.0
    for i in range(len(layer.cpu_s)):
        lane = 0
        added = layer.cpu_s[i]
        best = share[0] * added
        for g in range(len(layer.gpu_s)):
            seconds = (1.0 - mix) * layer.gpu_s[g, i] + mix * layer.copy_s[g, i]
            if share[g + 1] * seconds < best:
                best = share[g + 1] * seconds
                lane = g + 1
                added = seconds
        load[lane] += added
        total += best
    return total


@compiled
def _balance(layer: Layer, mix: float) -> np.ndarray:
    """Price of each lane, float64 [1 + G], sum 1: between each pair of lanes, bisect
    until their loads balance.

    With one GPU that is the optimal dual solution of the mix.
    """
    lanes = len(layer.gpu_s) + 1
    share = np.full(lanes, 1.0 / lanes)
    load = np.empty(lanes)

    # One pair settles at once; with several, each bisection disturbs the others, so
    # the pairs are visited three times.
    for _ in range(1 if lanes == 2 else 3):
        for a in range(lanes - 1):
            for b in range(a + 1, lanes):
                both = share[a] + share[b]
                low = 0.0
                high = 1.0
                for _ in range(_BISECTIONS):
                    middle = 0.5 * (low + high)
                    share[a] = both * middle
                    share[b] = both - share[a]
                    _loads(layer, share, mix, load)
                    if load[a] > load[b]:
                        low = middle
                    else:
                        high = middle
    return share


@compiled(nb.Several((nb.float64[:, ::1], nb.float64[::1]))(LAYER))
def lagrangian_prices(layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    """Price the resources so that the priced work bounds the makespan from below, for
    several mixes.

    Returns:
        prices float64 [M, R], each row summing to 1; and by how much an expert's two
        cheapest lanes differ in the first row's prices, float64 [A].
    """
    gpus = len(layer.gpu_s)
    active = len(layer.cpu_s)
    # Without copies the link's share of a price is lost, so only mix 0 can be good.
    mixes = _MIXES if layer.copy_s.max() > 0.0 else 1
    price = np.zeros((mixes, 1 + 2 * gpus))
    for m in range(mixes):
        mix = m / (_MIXES - 1)
        share = _balance(layer, mix)
        price[m, 0] = share[0]
        for g in range(gpus):
            price[m, 1 + 2 * g] = share[g + 1] * (1.0 - mix)
            price[m, 2 + 2 * g] = share[g + 1] * mix

    regret = np.empty(active)
    for i in range(active):
        best = price[0, 0] * layer.cpu_s[i]
        second = np.inf
        for g in range(gpus):
            cost = price[0, 1 + 2 * g] * layer.gpu_s[g, i]
            second = min(second, max(best, cost))
            best = min(best, cost)
        regret[i] = second - best
    return price, regret


@compiled(nb.float64[:, ::1](LAYER, nb.float64[:, ::1]))
def priced_remainder(
    layer: Layer,
    price: np.ndarray,
) -> np.ndarray:
    """Priced cost of the experts ``order[n:]``, each on its cheapest lane: float64 [M,
    A + 1].
    """
    gpus = len(layer.gpu_s)
    active = len(layer.cpu_s)
    remainder = np.zeros((len(price), active + 1))
    for m in range(len(price)):
        # From the last expert on: each sum extends the one behind it.
        for n in range(active - 1, -1, -1):
            i = layer.order[n]
            least = price[m, 0] * layer.cpu_s[i]
            for g in range(gpus):
                compute = price[m, 1 + 2 * g] * layer.gpu_s[g, i]
                copy = price[m, 2 + 2 * g] * layer.copy_s[g, i]
                least = min(least, compute + copy)
            remainder[m, n] = remainder[m, n + 1] + least
    return remainder


# Relative improvement that is not worth looking for.
_TOLERANCE = 1e-10

# Relative difference of two clocks that rounding alone explains.
_NOISE = 1e-13

# Rows kept at a time in the first, quick pass and in the second.
_FIRST_ROWS = 64
_MOST_ROWS = 1 << 13

# Kept rows with which a new one is compared, with one GPU and with several; more
# prunes better, fewer is faster.
_NEIGHBOURS = 24
_MANY_NEIGHBOURS = 384

# Nodes of the decision tree at first; it doubles when it is full.
_FIRST_NODES = 1024


@compiled
def _advance(
    clocks: np.ndarray,
    lane: int,
    i: int,
    layer: Layer,
    result: np.ndarray,
) -> None:
    """Write to `result` the `clocks`, float64 [C], after expert `i` has been put on
    `lane`.
    """
    for k in range(len(clocks)):
        result[k] = clocks[k]

    if lane == 0:
        first_s = 0.0 if clocks[0] > 0.0 else layer.first_s
        result[0] += first_s + layer.cpu_s[i]
    else:
        g = lane - 1
        compute = 3 * lane - 2
        link = compute + 1
        arrivals = compute + 2
        compute_s = layer.gpu_s[g, i]
        if layer.copy_s[g, i] > 0.0:
            result[link] += layer.copy_s[g, i]
            result[arrivals] = max(result[arrivals], result[link]) + compute_s
        elif layer.landing_s[g, i] > 0.0:
            landing_s = layer.landing_s[g, i]
            result[arrivals] = max(result[arrivals], landing_s) + compute_s
        # Every expert counts here, arrivals too: a GPU is busy with all of them.
        result[compute] += compute_s


@compiled
def _makespan_s(clocks: np.ndarray) -> float:
    """End of the last computation; a link alone delays no result."""
    end_s = clocks[0]
    for compute in range(1, len(clocks), 3):
        end_s = max(end_s, clocks[compute], clocks[compute + 2])
    return end_s


@compiled
def _first_answer(
    layer: Layer,
    start: np.ndarray,
    lanes: np.ndarray,
) -> float:
    """Put each expert, in order, on the lane that would end first; fill `lanes` and
    return the makespan.
    """
    clocks = start.copy()
    child = np.empty(len(start))
    for i in layer.order:
        end_s = np.inf
        for lane in range(len(layer.gpu_s), -1, -1):
            _advance(clocks, lane, i, layer, child)
            if lane == 0:
                lane_s = child[0]
            else:
                lane_s = max(child[3 * lane - 2], child[3 * lane])
            if lane_s < end_s:
                lanes[i] = lane
                end_s = lane_s
        _advance(clocks, lanes[i], i, layer, child)
        clocks[:] = child
    return _makespan_s(clocks)


@compiled
def _least_s(
    child: np.ndarray,
    layer: Layer,
    price: np.ndarray,
    remainder: np.ndarray,
    n: int,
) -> float:
    """A lower bound of every makespan that starts with the clocks `child` of the first
    `n` experts.
    """
    least_s = _makespan_s(child)
    for m in range(len(price)):
        value = remainder[m, n] + price[m, 0] * child[0]
        for g in range(len(layer.link_s)):
            # A link counts from when it was free; what it copied before is no work.
            value += price[m, 1 + 2 * g] * child[1 + 3 * g]
            value += price[m, 2 + 2 * g] * (child[2 + 3 * g] - layer.link_s[g])
        least_s = max(least_s, value)
    return least_s


@compiled
def _dominated(
    child: np.ndarray,
    rows: np.ndarray,
    kept: int,
    slack_s: float,
) -> bool:
    """Whether one of the last kept rows is, but for `slack_s`, ahead in every clock;
    the CPU's always is.
    """
    neighbours = _NEIGHBOURS if len(child) == 4 else _MANY_NEIGHBOURS
    for j in range(kept - 1, max(-1, kept - 1 - neighbours), -1):
        dominates = True
        for k in range(1, len(child)):
            if rows[j, k] > child[k] + slack_s:
                dominates = False
                break
        if dominates:
            return True
    return False


@compiled
def _next_lane(
    layer: Layer,
    i: int,
    rows: np.ndarray,
    count: int,
    cursor: np.ndarray,
) -> int:
    """Lane whose next row, ``cursor[lane]``, has the earliest CPU clock once expert `i`
    is on it; -1 after the last.
    """
    earliest = -1
    earliest_s = np.inf
    for lane in range(len(cursor)):
        clock_s = rows[cursor[lane], 0] if cursor[lane] < count else np.inf
        if lane == 0:
            first_s = 0.0 if clock_s > 0.0 else layer.first_s
            clock_s += first_s + layer.cpu_s[i]
        if clock_s < earliest_s:
            earliest = lane
            earliest_s = clock_s
    return earliest


@compiled
def _extend(
    layer: Layer,
    n: int,
    settled: np.ndarray,
    price: np.ndarray,
    remainder: np.ndarray,
    best_s: float,
    slack_s: float,
    rows: np.ndarray,
    origin: np.ndarray,
    count: int,
    extended: np.ndarray,
    extended_origin: np.ndarray,
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
    # One cursor into the rows per lane. Rows stand in ascending CPU clock, so merging
    # the lanes' children keeps that order without a sort.
    cursor = np.zeros(lanes, np.int64)
    child = np.empty(rows.shape[1])
    kept = 0

    while True:
        lane = _next_lane(layer, i, rows, count, cursor)
        if lane < 0:
            return kept, nodes, tree
        parent = cursor[lane]
        cursor[lane] += 1
        _advance(rows[parent], lane, i, layer, child)
        for g in range(lanes - 1):
            if settled[g]:
                end_s = max(child[1 + 3 * g], child[3 + 3 * g])
                child[1 + 3 * g] = end_s
                child[3 + 3 * g] = end_s

        least_s = _least_s(child, layer, price, remainder, n + 1)
        if least_s >= best_s * (1.0 - _TOLERANCE):
            continue
        if _dominated(child, extended, kept, slack_s + _NOISE * best_s):
            continue

        if kept == len(extended):
            return -1, nodes, tree
        if nodes == len(tree):
            grown = np.empty((2 * nodes, 2), np.int64)
            grown[:nodes] = tree
            tree = grown
        tree[nodes, 0] = origin[parent]
        tree[nodes, 1] = lane
        extended[kept] = child
        extended_origin[kept] = nodes
        nodes += 1
        kept += 1


@compiled
def _settled(layer: Layer) -> np.ndarray:
    """From which position of the order on nothing that follows is resident on a GPU:
    bool [A, G].
    """
    gpus = len(layer.gpu_s)
    active = len(layer.cpu_s)
    settled = np.ones((active, gpus), np.bool_)
    for n in range(active - 1, 0, -1):
        i = layer.order[n]
        for g in range(gpus):
            arrives = layer.copy_s[g, i] > 0.0 or layer.landing_s[g, i] > 0.0
            settled[n - 1, g] = settled[n, g] and arrives
    return settled


@compiled(
    nb.Several((nb.int8[::1], nb.float64, nb.float64))(
        LAYER, SECONDS, nb.float64[:, ::1], nb.float64[:, ::1]
    )
)
def dynamic_program(
    layer: Layer,
    busy_s: np.ndarray,
    price: np.ndarray,
    remainder: np.ndarray,
) -> tuple[np.ndarray, float, float]:
    """Find the lanes with the smallest makespan.

    A first pass keeps few rows; where they do not fit, rows that are almost dominated
    go too, and the slack is added up. Only if it had to do that, a second pass that can
    keep many rows follows.

    Args:
        layer: costs and launch order.
        busy_s: float64 [G] until when each GPU is taken before any expert.
        price: float64 [M, R] of `lagrangian_prices`; any prices are valid, good ones
            are fast.
        remainder: float64 [M, A + 1] of `priced_remainder`, for the same prices and
            order.

    Returns:
        lanes int8 [A], their makespan, and a proven lower bound of every makespan:
        equal to it (which a relative 1e-10 may still beat) unless the second pass
        needed slack too.
    """
    gpus = len(layer.gpu_s)
    active = len(layer.cpu_s)
    start = np.zeros(1 + 3 * gpus)
    for g in range(gpus):
        start[1 + 3 * g] = busy_s[g]
        start[2 + 3 * g] = layer.link_s[g]

    lanes = np.zeros(active, np.int8)
    settled = _settled(layer)
    best_s = _first_answer(layer, start, lanes)
    bound_s = best_s

    for limit in (_FIRST_ROWS, _MOST_ROWS // gpus**2):
        rows = np.empty((limit, len(start)))
        extended = np.empty((limit, len(start)))
        origin = np.empty(limit, np.int64)
        extended_origin = np.empty(limit, np.int64)
        # Parent and lane of every row that was ever kept.
        tree = np.empty((_FIRST_NODES, 2), np.int64)
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
                kept, after, tree = _extend(
                    layer=layer,
                    n=n,
                    settled=settled[n],
                    price=price,
                    remainder=remainder,
                    best_s=best_s,
                    slack_s=slack_s,
                    rows=rows,
                    origin=origin,
                    count=count,
                    extended=extended,
                    extended_origin=extended_origin,
                    tree=tree,
                    nodes=nodes,
                )
                if kept < 0:
                    slack_s = max(2.0 * slack_s, 1e-6 * best_s)
            nodes = after
            count = kept
            # Slack of one expert may hide that much of the optimum; it is tried
            # smaller for the next expert, as crowding comes and goes.
            lost_s += slack_s
            slack_s *= 0.5

            rows, extended = extended, rows
            origin, extended_origin = extended_origin, origin

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
    return lanes, best_s, max(bound_s, remainder[:, 0].max())

"""Offline bounds on any cache, from the whole sequence of uses, by linear programming.

Between two uses of an expert lies a *stay*; a hit is a stay that was granted. At no
time may the granted stays need more than the capacity. Choosing the most valuable set
of stays is a flow problem: with equal sizes its linear relaxation has an integral
optimum; with unequal sizes no cache can do better than it, and the stays that it grants
wholly are a plan that can be carried out.

What is bounded: a cache that starts empty, is filled by demand only (no prefetch, no
initial content), may decline any admission, and may drop anything at the end of a step,
held or not.

U uses, P times.

Source: Berger, Beckmann, Harchol-Balter, SIGMETRICS 2018 (FOO and PFOO); Carlisle and
Lloyd 1995 (equal sizes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

# A stay granted to more than this share is granted: solvers answer 0.999….
_GRANTED = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class Uses:
    """Every use of every expert of one memory pool, in order of time.

    Attributes:
        time: int64 [U], ascending: when; uses of one layer step share a time.
        key: int64 [U], which expert.
        size: float64 [U], capacity it needs (slots or bytes).
        cost: float64 [U], what a miss of this use costs.
        entry: float64 [U], what it costs on top if this miss is to begin a stay.
    """

    time: np.ndarray
    key: np.ndarray
    size: np.ndarray
    cost: np.ndarray
    entry: np.ndarray

    def following(self) -> np.ndarray:
        """int64 [U]: index of the next use of the same expert; U if there is none."""
        count = len(self.key)
        order = np.lexsort((self.time, self.key))
        same = self.key[order[1:]] == self.key[order[:-1]]
        after = np.full(count, count, np.int64)
        after[order[:-1][same]] = order[1:][same]
        return after


@dataclass(frozen=True, slots=True)
class Stays:
    """What an optimal cache does with the stay after each use.

    Attributes:
        granted: float64 [U], share of the stay that begins at this use and ends at the
            expert's next.
        least_cost: no cache can pay less for all its misses.
        plan_cost: what the wholly granted stays alone pay; equal to `least_cost` when
            all shares are 0 or 1.
    """

    granted: np.ndarray
    least_cost: float
    plan_cost: float

    @property
    def kept(self) -> np.ndarray:
        """Bool [U]: wholly granted stays."""
        return self.granted > _GRANTED


def best_stays(uses: Uses, capacity: float) -> Stays:
    """Grant stays so that misses cost least, within `capacity` between any two times.

    One variable per stay, one per beginning that costs extra, one for the capacity in
    use at each time; the rows state how the capacity in use changes, so the matrix has
    a few entries per use.
    """
    count = len(uses.key)
    total = float(uses.cost.sum())
    after = uses.following()
    stays = np.flatnonzero((after < count) & (uses.size <= capacity))
    if not len(stays) or capacity <= 0:
        return Stays(np.zeros(count), total, total)

    ends = after[stays]
    times, time_of = np.unique(uses.time, return_inverse=True)
    n = len(stays)
    p = len(times)

    # Only beginnings that cost extra need a variable; for each, the stay before it.
    number = np.full(count, -1, np.int64)
    number[stays] = np.arange(n)
    costly = np.flatnonzero(uses.entry[stays] > 0.0)
    before = np.full(n, -1, np.int64)
    chained = number[ends] >= 0
    before[number[ends][chained]] = np.flatnonzero(chained)
    m = len(costly)

    # Capacity in use: y[t] = y[t-1] + beginnings - ends, 0 <= y <= capacity.
    t = np.arange(p)
    size = uses.size[stays]
    rows = np.concatenate((t, t[1:], time_of[stays], time_of[ends]))
    cols = np.concatenate((n + m + t, n + m + t[:-1], np.arange(n), np.arange(n)))
    values = np.concatenate((np.ones(p), -np.ones(p - 1), -size, size))
    balance = coo_array((values, (rows, cols)), shape=(p, n + m + p)).tocsr()

    # A beginning is a stay whose expert was not kept up to it, so
    # the stay minus the stay before it minus the beginning is at most 0.
    linked = np.flatnonzero(before[costly] >= 0)
    begin = np.arange(m)
    rows = np.concatenate((begin, begin, linked))
    cols = np.concatenate((costly, n + begin, before[costly][linked]))
    values = np.concatenate((np.ones(m), -np.ones(m), -np.ones(len(linked))))
    beginnings = None
    if m:
        matrix = coo_array((values, (rows, cols)), shape=(m, n + m + p))
        beginnings = matrix.tocsr()

    saved = uses.cost[ends]
    extra = uses.entry[stays][costly]
    bounds = np.zeros((n + m + p, 2))
    bounds[: n + m, 1] = 1.0
    bounds[n + m :, 1] = capacity
    solution = linprog(
        np.concatenate((-saved, extra, np.zeros(p))),
        A_ub=beginnings,
        b_ub=np.zeros(m) if m else None,
        A_eq=balance,
        b_eq=np.zeros(p),
        bounds=bounds,
        method="highs",
    )
    assert solution.status == 0, (
        f"the all-absent plan is feasible, yet: {solution.message}"
    )

    granted = np.zeros(count)
    granted[stays] = solution.x[:n]
    return Stays(
        granted=granted,
        least_cost=total + float(solution.fun),
        plan_cost=plan_cost(uses, granted > _GRANTED),
    )


def plan_cost(uses: Uses, kept: np.ndarray) -> float:
    """Sum what misses and beginnings cost when exactly the stays `kept`, bool [U], are
    granted.
    """
    after = uses.following()
    hit = np.zeros(len(kept), np.bool_)
    hit[after[kept]] = True
    misses = uses.cost[~hit].sum()
    beginnings = uses.entry[kept & ~hit].sum()
    return float(misses + beginnings)


def least_cost_fast(uses: Uses, capacity: float) -> float:
    """Bound the cost of all misses from below in O(U log U), for sequences too long for
    `best_stays`.

    Stays are granted by value per capacity and time until capacity times time is used
    up, as if they could be cut and shifted; `entry` is ignored, which only lowers the
    bound.

    Source: PFOO-L.
    """
    count = len(uses.key)
    after = uses.following()
    stays = np.flatnonzero((after < count) & (uses.size <= capacity))
    _, time_of = np.unique(uses.time, return_inverse=True)
    need = uses.size[stays] * (time_of[after[stays]] - time_of[stays])
    value = uses.cost[after[stays]]

    order = np.argsort(-value / need, kind="stable")
    used = np.cumsum(need[order])
    budget = capacity * float(time_of.max(initial=-1))
    granted = int(np.searchsorted(used, budget, side="right"))
    saved = float(value[order[:granted]].sum())

    # The first stay that does not fit is granted in part, so the bound stays a bound.
    if granted < len(order):
        left = budget - (used[granted - 1] if granted else 0.0)
        partial = order[granted]
        saved += float(value[partial] * left / need[partial])
    return float(uses.cost.sum()) - saved


def miss_costs(fetch_s: np.ndarray, cpu_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Price misses that are either fetched or computed on the CPU, whichever is
    shorter.

    Only a fetched expert can stay, so a stay that begins where the CPU would be shorter
    costs the difference.

    Args:
        fetch_s: float64 [U], seconds to fetch and compute on the GPU, beyond a hit's.
        cpu_s: float64 [U], seconds to compute on the CPU, beyond a hit's.

    Returns:
        `cost` and `entry` of `Uses`. Their sum over a run is lane time, not makespan:
        it bounds what all lanes together spend on misses.
    """
    cost = np.minimum(fetch_s, cpu_s)
    return cost, fetch_s - cost

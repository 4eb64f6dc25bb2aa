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
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

if TYPE_CHECKING:
    from scipy.sparse import csr_array

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
        # Sorted by key, then time: a use is followed by its neighbour, if of one key.
        earlier = order[:-1]
        later = order[1:]
        same = self.key[later] == self.key[earlier]
        after = np.full(count, count, np.int64)
        after[earlier[same]] = later[same]
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
    fits = uses.size <= capacity
    stays = np.flatnonzero((after < count) & fits)
    if not len(stays) or capacity <= 0:
        return Stays(np.zeros(count), total, total)

    ends = after[stays]
    times, time_of = np.unique(uses.time, return_inverse=True)
    count_stays = len(stays)
    count_times = len(times)
    costly = np.flatnonzero(uses.entry[stays] > 0.0)
    count_costly = len(costly)

    # Variables: the share of each stay; of each costly beginning; the capacity in use
    # at each time.
    shares = count_stays + count_costly
    columns = shares + count_times
    bounds = np.zeros((columns, 2))
    bounds[:shares, 1] = 1.0
    bounds[shares:, 1] = capacity

    saved = uses.cost[ends]
    extra = uses.entry[stays][costly]
    balance = _balance(
        size=uses.size[stays],
        begins=time_of[stays],
        ends=time_of[ends],
        times=count_times,
        first_time=shares,
    )
    beginnings = None
    if count_costly:
        beginnings = _beginnings(count, stays, ends, costly, columns)
    solution = linprog(
        np.concatenate((-saved, extra, np.zeros(count_times))),
        A_ub=beginnings,
        b_ub=np.zeros(count_costly) if count_costly else None,
        A_eq=balance,
        b_eq=np.zeros(count_times),
        bounds=bounds,
        method="highs",
    )
    assert solution.status == 0, (
        f"the all-absent plan is feasible, yet: {solution.message}"
    )

    granted = np.zeros(count)
    granted[stays] = solution.x[:count_stays]
    return Stays(
        granted=granted,
        least_cost=total + float(solution.fun),
        plan_cost=plan_cost(uses, granted > _GRANTED),
    )


def _balance(
    *,
    size: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    times: int,
    first_time: int,
) -> csr_array:
    """Rows that keep account of the capacity in use: one per time.

    ``y[t] = y[t - 1] + beginnings - ends``; the column of ``y[t]`` is `first_time` + t.
    """
    time = np.arange(times)
    stay = np.arange(len(size))
    in_use = first_time + time
    rows = (time, time[1:], begins, ends)
    columns = (in_use, in_use[:-1], stay, stay)
    values = (
        np.ones(times),
        -np.ones(times - 1),
        -size,
        size,
    )
    return _matrix(rows, columns, values, (times, first_time + times))


def _beginnings(
    count: int,
    stays: np.ndarray,
    ends: np.ndarray,
    costly: np.ndarray,
    columns: int,
) -> csr_array:
    """Rows that make costly beginnings pay: one for each of `costly`.

    A beginning is a stay whose expert was not kept up to it, so the stay minus the stay
    before it minus the beginning is at most 0.
    """
    # The stay that ends where another begins; -1 where a stay has none before it.
    number = np.full(count, -1, np.int64)
    number[stays] = np.arange(len(stays))
    before = np.full(len(stays), -1, np.int64)
    next_stay = number[ends]
    chained = next_stay >= 0
    before[next_stay[chained]] = np.flatnonzero(chained)

    begin = np.arange(len(costly))
    linked = np.flatnonzero(before[costly] >= 0)
    rows = (begin, begin, linked)
    stay_columns = (
        costly,
        len(stays) + begin,
        before[costly][linked],
    )
    values = (
        np.ones(len(costly)),
        -np.ones(len(costly)),
        -np.ones(len(linked)),
    )
    return _matrix(rows, stay_columns, values, (len(costly), columns))


def _matrix(
    rows: tuple[np.ndarray, ...],
    columns: tuple[np.ndarray, ...],
    values: tuple[np.ndarray, ...],
    shape: tuple[int, int],
) -> csr_array:
    """A sparse matrix from groups of entries."""
    entries = (
        np.concatenate(values),
        (np.concatenate(rows), np.concatenate(columns)),
    )
    return coo_array(entries, shape=shape).tocsr()


def plan_cost(
    uses: Uses,
    kept: np.ndarray,
) -> float:
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
    fits = uses.size <= capacity
    stays = np.flatnonzero((after < count) & fits)
    _, time_of = np.unique(uses.time, return_inverse=True)
    ends = after[stays]
    need = uses.size[stays] * (time_of[ends] - time_of[stays])
    value = uses.cost[ends]

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


def miss_costs(
    fetch_s: np.ndarray,
    cpu_s: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
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

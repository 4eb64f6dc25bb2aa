"""Offline bounds on any cache, from the whole sequence of uses, by linear programming.

Between two uses of an expert lies a *stay*; a hit is a stay that was granted. At no
time may the granted stays need more than the capacity; and a stay whose expert is not
resident *enters*, beside all stays that are there, since those that end in this step
are in use until it is over. Choosing the most valuable set of stays is a flow problem:
with equal sizes its linear relaxation has an integral optimum, which a cache can carry
out; with unequal sizes no cache can do better than it.

What is bounded: a cache that starts empty, is filled by demand only (no prefetch, no
initial content), and may decline any admission.

U uses, P times.

Source: Berger, Beckmann, Harchol-Balter, SIGMETRICS 2018 (FOO); Carlisle and
Lloyd 1995 (equal sizes); entries beside what is in use are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.base import CachePolicy, PolicyError
from moesim.policies.names import NONE

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext


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

    Two variables per stay and one for the capacity in use at each time; the rows state
    how the capacity in use changes, so the matrix has a few entries per use.
    """
    count = len(uses.key)
    total = float(uses.cost.sum())
    after = uses.following()
    fits = uses.size <= capacity
    stays = np.flatnonzero((after < count) & fits)
    if not len(stays) or capacity <= 0:
        return Stays(np.zeros(count), total, total)

    times, time_of = np.unique(uses.time, return_inverse=True)
    ends = after[stays]
    size = uses.size[stays]
    begins_at = time_of[stays]

    # Variables: the share of each stay, that of it which enters, and the capacity in
    # use behind each time.
    stay = np.arange(len(stays))
    entry = len(stays) + stay
    in_use = 2 * len(stays) + np.arange(len(times))
    columns = 2 * len(stays) + len(times)
    upper = np.ones(columns)
    upper[in_use] = capacity
    price = np.zeros(columns)
    price[stay] = -uses.cost[ends]
    price[entry] = uses.entry[stays]

    # What is in use changes by the stays that begin and end.
    balance = _matrix(
        (np.arange(len(times)), in_use, 1.0),
        (np.arange(1, len(times)), in_use[:-1], -1.0),
        (begins_at, stay, -size),
        (time_of[ends], stay, size),
        shape=(len(times), columns),
    )
    # What enters finds room beside all that was there: nobody that is used leaves
    # before the step is over.
    room = _matrix(
        (np.arange(1, len(times)), in_use[:-1], 1.0),
        (begins_at, entry, size),
        shape=(len(times), columns),
    )
    # A stay enters as far as its expert was not kept up to its beginning.
    number = np.full(count, -1, np.int64)
    number[stays] = stay
    following = number[ends]
    chained = np.flatnonzero(following >= 0)
    entries = _matrix(
        (stay, stay, 1.0),
        (stay, entry, -1.0),
        (following[chained], chained, -1.0),
        shape=(len(stays), columns),
    )
    # Half a second that whoever only lists policies need not wait for.
    from scipy.optimize import linprog  # noqa: PLC0415
    from scipy.sparse import vstack  # noqa: PLC0415

    solution = linprog(
        price,
        A_ub=vstack((room, entries)),
        b_ub=np.repeat((capacity, 0.0), (len(times), len(stays))),
        A_eq=balance,
        b_eq=np.zeros(len(times)),
        bounds=np.column_stack((np.zeros(columns), upper)),
        method="highs",
    )
    assert solution.status == 0, (
        f"the all-absent plan is feasible, yet: {solution.message}"
    )

    granted = np.zeros(count)
    granted[stays] = solution.x[stay]
    return Stays(
        granted=granted,
        least_cost=total + float(solution.fun),
        plan_cost=plan_cost(uses, granted > _GRANTED),
    )


def _matrix(
    *groups: tuple[np.ndarray, np.ndarray, np.ndarray | float], shape: tuple[int, int]
) -> csr_array:
    """A sparse matrix from groups of entries: rows, columns, values."""
    from scipy.sparse import coo_array  # noqa: PLC0415 - as above

    rows, columns, values = zip(*groups, strict=True)
    filled = [
        np.broadcast_to(value, len(row))
        for row, value in zip(rows, values, strict=True)
    ]
    entries = (
        np.concatenate(filled),
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


# 115,200 uses took 8 s of one core, and 29 s where beginnings cost extra (measured).
MOST_USES = 120_000
"""Uses that one pool may have."""


def sizes_in_slots(key: np.ndarray, context: RunContext) -> np.ndarray:
    """Sizes of experts in slots of their pool, which count its largest: float64, same
    shape as the flat keys `key`.
    """
    sizes = np.array(context.shape.sizes_by_expert(), np.float64)
    is_global = len(context.capacity_slots) == 1
    largest = sizes.max() if is_global else sizes.max(axis=1, keepdims=True)
    return np.asarray((sizes / largest).reshape(-1)[key])


class OfflineOptimalCache(CachePolicy):
    """Follows `best_stays`; subclasses price the uses in `uses`.

    An expert that is not to stay may linger and be hit, held, and in the way of one
    that is to enter; so a run has as many hits as the plan at least, where sizes are
    equal. Content that was filled in before the run is not planned: it serves until it
    is evicted, so bounds hold for an empty start only.

    Attributes:
        stays: the solved pools, one per layer or one in global scope.
    """

    oracle: ClassVar[bool] = True
    stays: list[Stays]

    def start(self, context: RunContext) -> None:
        """Solve every pool.

        Raises:
            PolicyError: the future is not available, or too long.
        """
        future = context.future
        if future is None:
            raise PolicyError(
                f"cache policy {self._label!r} must see the future; only a replay of a"
                " whole trace has one"
            )

        # All uses of the run, in order: a time is a step, then a layer.
        layers = context.shape.layers
        experts = context.shape.experts
        step_layers = [divmod(time, layers) for time in range(future.never * layers)]
        active = [future.active(step, layer) for step, layer in step_layers]
        workloads = [future.tokens(step, layer) for step, layer in step_layers]
        lengths = [len(experts_of_time) for experts_of_time in active]
        # Uses of time t are numbered from edge t to edge t + 1.
        edges = np.zeros(len(active) + 1, np.int64)
        edges[1:] = np.cumsum(lengths)
        time = np.repeat(np.arange(len(active)), lengths)
        # The empty array in front keeps a run without any layer step legal.
        empty = np.empty(0, np.int32)
        ids = np.concatenate([empty, *active])
        tokens = np.concatenate([empty, *workloads])

        layer_of = time % layers
        keys = layer_of * experts + ids.astype(np.int64)
        plan = np.zeros(len(keys), np.bool_)

        if len(context.capacity_slots) == 1:
            pools = [np.arange(len(time))]
        else:
            pools = [np.flatnonzero(layer_of == layer) for layer in range(layers)]

        self.stays = []
        capacities = context.capacity_slots.tolist()
        for slots, members in zip(capacities, pools, strict=True):
            if len(members) > MOST_USES:
                raise PolicyError(
                    f"cache policy {self._label!r}: {len(members)} uses in one pool,"
                    f" at most {MOST_USES} can be solved; cut the replay with --steps"
                )
            uses, capacity = self.uses(
                time=time[members],
                key=keys[members],
                tokens=tokens[members],
                slots=slots,
                context=context,
            )
            stays = best_stays(uses, capacity)
            self.stays.append(stays)
            plan[members] = stays.kept

        self.layers = layers
        self.edges: Ints = edges.data
        self.keys: Ints = keys.data
        self.plan: Ints = plan.view(np.int8).data
        # By key: whether it stays.
        self.keep: Ints = zeros(layers * experts, np.int8)

    def accessed(self, work: Work) -> None:
        time = work.step * self.layers + work.layer
        for use in range(self.edges[time], self.edges[time + 1]):
            self.keep[self.keys[use]] = self.plan[use]

    def admits(self, work: Work, key: int) -> bool:
        return self.keep[key] != 0

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        leaving = (key for key in candidates if not self.keep[key])
        for n in range(len(incoming)):
            chosen[n] = next(leaving, NONE)

    @property
    def _label(self) -> str:
        return type(self).__module__.rpartition(".")[2].replace("_", "-")

    def uses(
        self,
        time: np.ndarray,
        key: np.ndarray,
        tokens: np.ndarray,
        slots: int,
        context: RunContext,
    ) -> tuple[Uses, float]:
        """Price the uses of one pool, `time`, `key` int64 [U], `tokens` int32 [U];
        return them and the pool's capacity.
        """
        raise NotImplementedError

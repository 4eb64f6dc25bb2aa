"""The best lanes of a layer step, exactly, fast enough to ask at every layer step.

Two measures of an assignment. The *modelled* makespan is DALI's: a lane's time is the
sum of its experts' costs, where an expert waits for its weights or computes, whichever
takes longer. The *scheduled* makespan follows the operations: copies follow each other
on a link, a GPU computes residents first and then arrivals as they land. The first is
what most policies minimise; the second is closer to what the machine does.

A active experts, E experts of a layer, G GPUs.
"""

from __future__ import annotations

from functools import cache
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.assignment._dynamic_program import LaneSearch
from moesim.policies.assignment._placing import flying, transfer_s
from moesim.policies.names import CPU

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Work


class Optimum(NamedTuple):
    """The best lanes that the search found.

    Attributes:
        makespan_s: time of the slowest lane.
        lanes: int8 [A], as `assign` fills them in.
        bound_s: no lanes are faster than this. Equal to `makespan_s` (proven up to a
            relative 1e-10) unless the search outgrew its memory, which takes many
            experts of which no two cost the same.
        order: int64 [A], the launch order that goes with them.
    """

    makespan_s: float
    lanes: np.ndarray
    bound_s: float
    order: np.ndarray


class OptimumSearch:
    """Room for searches in layer steps of G GPUs and at most E experts.

    Attributes:
        makespan_s, lanes, bound_s, order: as in `Optimum`, of E places.
    """

    def __init__(self, gpus: int, experts: int) -> None:
        self.search = LaneSearch(gpus, experts)
        self.makespan_s = self.bound_s = 0.0
        self.lanes: Ints = zeros(experts, np.int8)
        self.order: Ints = zeros(experts, np.int64)
        self.first_landing_s: Floats = zeros(experts)

    def modelled(self, work: Work) -> None:
        """Minimise the modelled makespan.

        Experts whose lane matters most are launched first.
        """
        self.makespan_s = self.bound_s = inf
        waiting = 0
        for g in range(work.gpus):
            if work.link_s[g] != 0.0:
                waiting += 1
        # Whether a GPU waits for the copy under way on its link is decided first: only
        # then may it take absent experts.
        for choice in range(1 << waiting):
            self._model(work, choice)
            self.search.solve(work.active)
            self.bound_s = min(self.bound_s, self.search.bound_s)
            if self.search.makespan_s < self.makespan_s:
                self._take(work)

    def scheduled(self, work: Work) -> None:
        """Minimise the scheduled makespan."""
        self.schedule(work)
        residents = 0
        for i in range(work.active):
            residents += _is_resident(work, i)
        # Residents wait for no copy, so they may be launched in any order.
        self.search.solve(residents)
        self.bound_s = self.search.bound_s
        self._take(work)

    def _take(self, work: Work) -> None:
        self.makespan_s = self.search.makespan_s
        for i in range(work.active):
            self.lanes[i] = self.search.lanes[i]
            self.order[i] = self.search.order[i]

    def _model(self, work: Work, choice: int) -> None:
        """Fill in the modelled problem, where of the GPUs that would wait for a copy
        under way those in `choice` do, a bit each, and the others take no absent
        expert.
        """
        search = self.search
        search.active = work.active
        search.first_s = 0.0
        bit = 0
        for g in range(work.gpus):
            search.link_s[g] = search.busy_s[g] = 0.0
            refuses = False
            if work.link_s[g] != 0.0:
                refuses = not choice >> bit & 1
                bit += 1
                search.busy_s[g] = 0.0 if refuses else work.link_s[g]
            for i in range(work.active):
                # Arrival is part of an expert's cost on a GPU.
                search.copy_s[g, i] = search.landing_s[g, i] = 0.0
                cost_s = max(transfer_s(work, g, i), work.gpu_s[g, i])
                if refuses and work.arrive_s[g, i] > work.link_s[g]:
                    cost_s = inf
                search.gpu_s[g, i] = cost_s
        for i in range(work.active):
            search.cpu_s[i] = max(work.host_s[i], work.cpu_s[i])
            search.order[i] = i
        self._forbid(work, True)

    def schedule(self, work: Work) -> None:
        """Fill in the layer step with its copies, and the launch order of
        `scheduled_s`.
        """
        search = self.search
        search.active = work.active
        search.first_s = work.first_cpu_s
        for i in range(work.active):
            search.cpu_s[i] = max(work.host_s[i], work.cpu_s[i])
            self.first_landing_s[i] = inf
        for g in range(work.gpus):
            search.busy_s[g] = 0.0
            search.link_s[g] = work.link_s[g]
            for i in range(work.active):
                search.gpu_s[g, i] = work.gpu_s[g, i]
                search.copy_s[g, i] = transfer_s(work, g, i)
                search.landing_s[g, i] = 0.0
                if flying(work, g, i):
                    landing_s = work.arrive_s[g, i]
                    search.copy_s[g, i] = 0.0
                    search.landing_s[g, i] = landing_s
                    search.link_s[g] = max(search.link_s[g], landing_s)
                    first_s = min(self.first_landing_s[i], landing_s)
                    self.first_landing_s[i] = first_s
        self._forbid(work, False)
        # Residents, then by landing, then the longest on the GPU.
        order = search.order
        for n in range(work.active):
            place = n
            while place > 0 and self._is_before(work, n, order[place - 1]):
                order[place] = order[place - 1]
                place -= 1
            order[place] = n

    def _is_before(self, work: Work, i: int, j: int) -> bool:
        """Whether one expert is launched before another that stands before it."""
        if _is_resident(work, i) != _is_resident(work, j):
            return _is_resident(work, i)
        if self.first_landing_s[i] != self.first_landing_s[j]:
            return self.first_landing_s[i] < self.first_landing_s[j]
        return work.gpu_s[0, i] > work.gpu_s[0, j]

    def _forbid(self, work: Work, twice: bool) -> None:
        """Make infinite costs, of lanes that are no choice, a number that is more than
        any assignment without them costs.

        The search weighs costs by prices, and zero times infinity is no number. Costs
        on a GPU count `twice` where copies are part of them.
        """
        search = self.search
        forbidden_s = 1e3
        for i in range(work.active):
            if search.cpu_s[i] < inf:
                forbidden_s += 1e3 * search.cpu_s[i]
            for g in range(work.gpus):
                if search.gpu_s[g, i] < inf:
                    forbidden_s += 1e3 * search.gpu_s[g, i]
                copy_s = search.gpu_s[g, i] if twice else search.copy_s[g, i]
                if copy_s < inf:
                    forbidden_s += 1e3 * copy_s
        for i in range(work.active):
            search.cpu_s[i] = min(search.cpu_s[i], forbidden_s)
            for g in range(work.gpus):
                search.gpu_s[g, i] = min(search.gpu_s[g, i], forbidden_s)
                search.copy_s[g, i] = min(search.copy_s[g, i], forbidden_s)


def _is_resident(work: Work, i: int) -> bool:
    """Whether no GPU would have to wait for an expert."""
    for g in range(work.gpus):
        if work.arrive_s[g, i] > 0.0:
            return False
    return True


def _room(work: Work) -> OptimumSearch:
    """One for all layer steps of a size, as nobody asks twice at a time."""
    return _room_for(work.gpus, 1 << max(0, work.active - 1).bit_length())


@cache
def _room_for(gpus: int, experts: int) -> OptimumSearch:
    return OptimumSearch(gpus, experts)


def _found(search: OptimumSearch, active: int) -> Optimum:
    return Optimum(
        search.makespan_s,
        np.array(search.lanes)[:active],
        search.bound_s,
        np.array(search.order)[:active],
    )


def optimal(work: Work) -> Optimum:
    """Minimise the modelled makespan, ``max(sum of max(host_s, cpu_s), sum of
    max(arrive_s, gpu_s))``, over lanes; see `modelled_s`.

    Experts whose lane matters most are launched first.

    Source: DALI, equations 3-9 without the staging limit.
    """
    search = _room(work)
    search.modelled(work)
    return _found(search, work.active)


def optimal_scheduled(work: Work) -> Optimum:
    """Minimise the scheduled makespan over lanes; see `scheduled_s`."""
    search = _room(work)
    search.scheduled(work)
    return _found(search, work.active)


def modelled_costs(work: Work) -> np.ndarray:
    """Seconds that each expert adds to each lane, without waits for copies under way:
    float64 [1 + G, A].
    """
    seen = work.arrays()
    behind = seen.arrive_s > seen.link_s[:, None]
    arrive_s = np.where(behind, seen.arrive_s - seen.link_s[:, None], seen.arrive_s)
    gpu_s = np.maximum(arrive_s, seen.gpu_s)
    return np.vstack([np.maximum(seen.host_s, seen.cpu_s), gpu_s])


def modelled_s(work: Work, lanes: np.ndarray) -> float:
    """Modelled makespan of an assignment: the largest sum of costs.

    A GPU waits once for the copy under way on its link, if it is given absent experts.
    """
    seen = work.arrays()
    # What comes behind the copy under way.
    absent = seen.arrive_s > seen.link_s[:, None]
    loads = []
    for lane, cost_s in enumerate(modelled_costs(work)):
        there = lanes == lane
        waits = lane != CPU and (there & absent[lane - 1]).any()
        loads.append(cost_s[there].sum() + (seen.link_s[lane - 1] if waits else 0.0))
    return float(max(loads))


def scheduled_s(
    work: Work, lanes: np.ndarray, order: np.ndarray | None = None
) -> float:
    """Scheduled makespan of an assignment.

    An absent expert's copy follows the one before it; the first waits for the copy
    under way. A GPU computes its residents, then what lands, in launch order: first
    what is in flight, by landing, then what takes the GPU longest, which is Johnson's
    rule where all copies take the same time. The CPU charges each expert ``max(host_s,
    cpu_s)``, and the first of a layer step its extra seconds.

    Args:
        work: the layer step.
        lanes: int8 [A].
        order: int64 [A] another launch order; None for the one above.
    """
    room = _room(work)
    room.schedule(work)
    made = room.search
    link_s = list(made.link_s)
    cpu_s = 0.0
    ends = [0.0] * work.gpus

    for i, lane in enumerate(lanes):
        g = lane - 1
        if lane == CPU:
            cpu_s += made.cpu_s[i]
        elif not made.copy_s[g, i] and not made.landing_s[g, i]:
            ends[g] += made.gpu_s[g, i]

    for i in np.array(made.order)[: work.active] if order is None else order:
        g = lanes[i] - 1
        if g < 0 or not (made.copy_s[g, i] or made.landing_s[g, i]):
            continue
        lands_s = made.landing_s[g, i]
        if made.copy_s[g, i]:
            link_s[g] += made.copy_s[g, i]
            lands_s = link_s[g]
        ends[g] = max(ends[g], lands_s) + made.gpu_s[g, i]

    cpu_extra_s = work.first_cpu_s * bool((lanes == CPU).any())
    return float(max(cpu_s + cpu_extra_s, *ends))

"""The best lanes of a layer step, exactly, fast enough to ask at every layer step.

Two measures of an assignment. The *modelled* makespan is DALI's: a lane's time is the
sum of its experts' costs, where an expert waits for its weights or computes, whichever
takes longer. The *scheduled* makespan follows the operations: copies follow each other
on a link, a GPU computes residents first and then arrivals as they land. The first is
what most policies minimise; the second is closer to what the machine does.

A active experts, G GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.policies.assignment._dynamic_program import (
    Layer,
    dynamic_program,
    lagrangian_prices,
    priced_remainder,
)
from moesim.policies.assignment._kernels import flying, transfers
from moesim.policies.base import CPU
from moesim.policies.compiled import kernel_work
from moesim.policies.kernels import LANES, ORDER, WORK, Work

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, MachineView

_FOUND = nb.Several((nb.float64, LANES, nb.float64, ORDER))
"""What `Optimum` holds."""


class Optimum(NamedTuple):
    """The best lanes that the search found.

    Attributes:
        makespan_s: time of the slowest lane.
        lanes: int8 [A], as in `Assignment`.
        bound_s: no lanes are faster than this. Equal to `makespan_s` (proven up to a
            relative 1e-10) unless the search outgrew its memory, which takes many
            experts of which no two cost the same.
        order: int64 [A], the launch order that goes with them.
    """

    makespan_s: float
    lanes: np.ndarray
    bound_s: float
    order: np.ndarray


def optimal(work: LayerWork) -> Optimum:
    """Minimise the modelled makespan, ``max(sum of max(host_s, cpu_s), sum of
    max(arrive_s, gpu_s))``, over lanes; see `modelled_s`.

    Experts whose lane matters most are launched first.

    Source: DALI, equations 3-9 without the staging limit.
    """
    return Optimum(*modelled_optimum(kernel_work(work)))


def optimal_scheduled(
    work: LayerWork,
    view: MachineView,
) -> Optimum:
    """Minimise the scheduled makespan over lanes; see `scheduled_s`."""
    return Optimum(*scheduled_optimum(kernel_work(work, view)))


def modelled_s(
    work: LayerWork,
    lanes: np.ndarray,
) -> float:
    """Modelled makespan of an assignment: the largest sum of costs.

    A GPU waits once for the copy under way on its link, if it is given absent experts.
    """
    loads = [np.maximum(work.host_s, work.cpu_s)[lanes == CPU].sum()]
    busy_s = link_s(work)
    # What comes behind the copy under way.
    absent = work.arrive_s > busy_s[:, None]
    costs_s = np.maximum(transfers(work.arrive_s, busy_s), work.gpu_s)
    for g, cost_s in enumerate(costs_s):
        there = lanes == 1 + g
        wait_s = busy_s[g] if (there & absent[g]).any() else 0.0
        loads.append(cost_s[there].sum() + wait_s)
    return float(max(loads))


def scheduled_s(
    work: LayerWork,
    view: MachineView,
    lanes: np.ndarray,
    order: np.ndarray | None = None,
) -> float:
    """Scheduled makespan of an assignment.

    An absent expert's copy follows the one before it; the first waits for the copy
    under way. A GPU computes its residents, then what
    lands, in launch order: first what is in flight, by landing, then what takes the GPU
    longest, which is Johnson's rule where all copies take the same time. The CPU
    charges each expert ``max(host_s, cpu_s)``, and the first of a layer step its extra
    seconds.

    Args:
        work: the layer step.
        view: the machine.
        lanes: int8 [A].
        order: int64 [A] another launch order; None for the one above.
    """
    given = kernel_work(work, view)
    each_s, gpu_s, copy_s, landing_s, link_s, launched = _scheduled(given)
    cpu_s = 0.0
    ends = [0.0] * len(link_s)

    for i, lane in enumerate(lanes):
        g = lane - 1
        if lane == CPU:
            cpu_s += each_s[i]
        elif not copy_s[g, i] and not landing_s[g, i]:
            ends[g] += gpu_s[g, i]

    for i in launched if order is None else order:
        g = lanes[i] - 1
        if g < 0 or not (copy_s[g, i] or landing_s[g, i]):
            continue
        lands_s = landing_s[g, i]
        if copy_s[g, i]:
            link_s[g] += copy_s[g, i]
            lands_s = link_s[g]
        ends[g] = max(ends[g], lands_s) + gpu_s[g, i]

    cpu_extra_s = given.first_cpu_s * bool((lanes == CPU).any())
    return float(max(cpu_s + cpu_extra_s, *ends))


def link_s(work: LayerWork) -> np.ndarray:
    """Seconds until each link has ended the copy under way: float64 [G]."""
    return np.zeros(len(work.arrive_s)) if work.link_s is None else work.link_s


@compiled(_FOUND(WORK))
def modelled_optimum(work: Work) -> tuple[float, np.ndarray, float, np.ndarray]:
    """`optimal`, of kernels' work."""
    gpus = len(work.arrive_s)
    best_s = np.inf
    bound_s = np.inf
    lanes = np.zeros(len(work.experts), np.int8)
    order = np.arange(len(work.experts))
    # Whether a GPU waits for the copy under way on its link is decided first: only
    # then may it take absent experts.
    waiting = np.flatnonzero(work.link_s)
    for choice in range(1 << len(waiting)):
        refuses = np.zeros(gpus, np.bool_)
        busy_s = work.link_s.copy()
        for n in range(len(waiting)):
            if not choice >> n & 1:
                refuses[waiting[n]] = True
                busy_s[waiting[n]] = 0.0
        cpu_s, gpu_s = _modelled(work, refuses)
        launched = np.arange(len(work.experts))
        # Arrival is part of an expert's cost on a GPU.
        zeros = np.zeros(gpu_s.shape)
        layer = Layer(
            cpu_s=cpu_s,
            gpu_s=gpu_s,
            copy_s=zeros,
            landing_s=zeros,
            link_s=np.zeros(gpus),
            first_s=0.0,
            order=launched,
        )
        made_s, made, least_s = _solve(layer, len(work.experts), busy_s)
        bound_s = min(bound_s, least_s)
        if made_s < best_s:
            best_s = made_s
            lanes[:] = made
            order[:] = launched
    return best_s, lanes, bound_s, order


@compiled(_FOUND(WORK))
def scheduled_optimum(work: Work) -> tuple[float, np.ndarray, float, np.ndarray]:
    """`optimal_scheduled`, of kernels' work."""
    residents = 0
    for i in range(len(work.experts)):
        residents += _is_resident(work, i)
    cpu_s, gpu_s, copy_s, landing_s, link_s, order = _scheduled(work)
    layer = Layer(
        cpu_s=cpu_s,
        gpu_s=gpu_s,
        copy_s=copy_s,
        landing_s=landing_s,
        link_s=link_s,
        first_s=work.first_cpu_s,
        order=order,
    )
    # Residents wait for no copy, so they may be launched in any order.
    best_s, lanes, bound_s = _solve(layer, residents, np.zeros(len(link_s)))
    return best_s, lanes, bound_s, order


@compiled
def _solve(
    layer: Layer, free: int, busy_s: np.ndarray
) -> tuple[float, np.ndarray, float]:
    """Sort the first `free` experts of the order by how much their lane matters, and
    solve.

    Args:
        layer: costs and launch order.
        free: how many experts may be launched in any order.
        busy_s: float64 [G] until when each GPU is taken before any expert.

    Returns:
        makespan, lanes and bound, as in `Optimum`.
    """
    price, regret = lagrangian_prices(layer)
    order = layer.order
    # Deciding first where it matters most lets the bounds prune early.
    for n in range(free):
        i = order[n]
        place = n
        while place > 0 and regret[order[place - 1]] < regret[i]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = i
    remainder = priced_remainder(layer, price)
    lanes, makespan_s, bound_s = dynamic_program(layer, busy_s, price, remainder)
    return makespan_s, lanes, bound_s


@compiled
def _modelled(work: Work, refuses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Costs on the CPU [A] and on GPUs [G, A], where those that are refused, bool [G],
    take no absent expert.
    """
    gpus, active = work.arrive_s.shape
    cpu_s = np.maximum(work.host_s, work.cpu_s)
    gpu_s = transfers(work.arrive_s, work.link_s)
    for g in range(gpus):
        for i in range(active):
            gpu_s[g, i] = max(gpu_s[g, i], work.gpu_s[g, i])
            if refuses[g] and work.arrive_s[g, i] > work.link_s[g]:
                gpu_s[g, i] = np.inf
    _bound(cpu_s, gpu_s, gpu_s)
    return cpu_s, gpu_s


@compiled
def _scheduled(work: Work) -> tuple[np.ndarray, ...]:
    """The layer step with its copies, and the launch order of `scheduled_s`: arrays of
    a `Layer`.
    """
    gpus, active = work.arrive_s.shape
    coming = flying(work.gpu_state, work.arrive_s)
    cpu_s = np.maximum(work.host_s, work.cpu_s)
    gpu_s = work.gpu_s.copy()
    copy_s = transfers(work.arrive_s, work.link_s)
    landing_s = np.zeros((gpus, active))
    link_s = work.link_s.copy()
    first_landing_s = np.full(active, np.inf)
    for g in range(gpus):
        for i in range(active):
            if coming[g, i]:
                copy_s[g, i] = 0.0
                landing_s[g, i] = work.arrive_s[g, i]
                link_s[g] = max(link_s[g], landing_s[g, i])
                first_landing_s[i] = min(first_landing_s[i], landing_s[g, i])
    _bound(cpu_s, gpu_s, copy_s)

    # Residents, then by landing, then the longest on the GPU.
    order = np.arange(active)
    for n in range(active):
        place = n
        while place > 0 and _is_before(work, first_landing_s, n, order[place - 1]):
            order[place] = order[place - 1]
            place -= 1
        order[place] = n
    return cpu_s, gpu_s, copy_s, landing_s, link_s, order


@compiled
def _is_before(work: Work, first_landing_s: np.ndarray, i: int, j: int) -> bool:
    """Whether one expert is launched before another that stands before it."""
    if _is_resident(work, i) != _is_resident(work, j):
        return _is_resident(work, i)
    if first_landing_s[i] != first_landing_s[j]:
        return bool(first_landing_s[i] < first_landing_s[j])
    return bool(work.gpu_s[0, i] > work.gpu_s[0, j])


@compiled
def _is_resident(work: Work, i: int) -> bool:
    """Whether no GPU would have to wait for an expert."""
    for g in range(len(work.arrive_s)):
        if work.arrive_s[g, i] > 0.0:
            return False
    return True


@compiled
def _bound(cpu_s: np.ndarray, gpu_s: np.ndarray, copy_s: np.ndarray) -> None:
    """Make infinite costs, of lanes that are no choice, a number that is more than any
    assignment without them costs.

    The search weighs costs by prices, and zero times infinity is no number.
    """
    forbidden_s = 1e3
    for i in range(len(cpu_s)):
        if cpu_s[i] < np.inf:
            forbidden_s += 1e3 * cpu_s[i]
        for g in range(len(gpu_s)):
            if gpu_s[g, i] < np.inf:
                forbidden_s += 1e3 * gpu_s[g, i]
            if copy_s[g, i] < np.inf:
                forbidden_s += 1e3 * copy_s[g, i]
    for i in range(len(cpu_s)):
        cpu_s[i] = min(cpu_s[i], forbidden_s)
        for g in range(len(gpu_s)):
            gpu_s[g, i] = min(gpu_s[g, i], forbidden_s)
            copy_s[g, i] = min(copy_s[g, i], forbidden_s)

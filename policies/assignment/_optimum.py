"""The best lanes of a layer step, exactly, fast enough to ask at every layer step.

Two measures of an assignment. The *modelled* makespan is DALI's: a lane's time is the
sum of its experts' costs, where an expert waits for its weights or computes, whichever
takes longer. The *scheduled* makespan follows the operations: copies follow each other
on a link, a GPU computes residents first and then arrivals as they land. The first is
what most policies minimise; the second is closer to what the machine does.

A active experts, G GPUs.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from moesim.policies.assignment._dynamic_program import (
    Layer,
    dynamic_program,
    lagrangian_prices,
    priced_remainder,
)
from moesim.policies.assignment._kernels import flying
from moesim.policies.base import CPU
from moesim.policies.compiled import kernel_work
from moesim.policies.ranking import highest_first

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, MachineView

_NO_GPU: Final = np.empty(0, np.int64)


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
    if work.link_s is None or not work.link_s.any():
        return _solve(_modelled(work), free=len(work.experts))

    # Whether a GPU waits for the copy under way on its link is decided first: only
    # then may it take absent experts.
    waiting = np.flatnonzero(work.link_s)
    best: Optimum | None = None
    bound_s = np.inf
    for choice in product((False, True), repeat=len(waiting)):
        refused = waiting[np.logical_not(choice)]
        busy_s = work.link_s.copy()
        busy_s[refused] = 0.0
        layer = _modelled(work, refused)
        candidate = _solve(layer, free=len(work.experts), busy_s=busy_s)
        bound_s = min(bound_s, candidate.bound_s)
        if best is None or candidate.makespan_s < best.makespan_s:
            best = candidate
    assert best is not None
    return best._replace(bound_s=bound_s)


def optimal_scheduled(
    work: LayerWork,
    view: MachineView,
) -> Optimum:
    """Minimise the scheduled makespan over lanes; see `scheduled_s`."""
    # Residents wait for no copy, so they may be launched in any order.
    residents = int(_resident_everywhere(work).sum())
    return _solve(_scheduled(work, view), free=residents)


def modelled_s(
    work: LayerWork,
    lanes: np.ndarray,
) -> float:
    """Modelled makespan of an assignment: the largest sum of costs.

    A GPU waits once for the copy under way on its link, if it is given absent experts.
    """
    loads = [_cpu_cost_s(work)[lanes == CPU].sum()]
    absent = _absent(work)
    for g, cost_s in enumerate(_gpu_cost_s(work)):
        there = lanes == 1 + g
        wait_s = link_s(work)[g] if (there & absent[g]).any() else 0.0
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
    layer = _scheduled(work, view)
    cpu_s = 0.0
    link_s = layer.link_s.copy()
    ends = [0.0] * len(layer.link_s)

    for i, lane in enumerate(lanes):
        g = lane - 1
        if lane == CPU:
            cpu_s += layer.cpu_s[i]
        elif not layer.copy_s[g, i] and not layer.landing_s[g, i]:
            ends[g] += layer.gpu_s[g, i]

    for i in layer.order if order is None else order:
        g = lanes[i] - 1
        if g < 0 or not (layer.copy_s[g, i] or layer.landing_s[g, i]):
            continue
        lands_s = layer.landing_s[g, i]
        if layer.copy_s[g, i]:
            link_s[g] += layer.copy_s[g, i]
            lands_s = link_s[g]
        ends[g] = max(ends[g], lands_s) + layer.gpu_s[g, i]

    cpu_extra_s = layer.first_s * bool((lanes == CPU).any())
    return float(max(cpu_s + cpu_extra_s, *ends))


def _cpu_cost_s(work: LayerWork) -> np.ndarray:
    """Modelled cost of each expert on the CPU: [A]."""
    return np.maximum(work.host_s, work.cpu_s)


def _gpu_cost_s(work: LayerWork) -> np.ndarray:
    """Modelled cost of each expert on each GPU, without the wait for the copy under
    way: [G, A].
    """
    return np.maximum(transfer_s(work), work.gpu_s)


def _absent(work: LayerWork) -> np.ndarray:
    """Experts that come behind the copy under way: bool [G, A]."""
    return work.arrive_s > link_s(work)[:, None]


def _modelled(work: LayerWork, refused: np.ndarray = _NO_GPU) -> Layer:
    """The layer step without copies: arrival is part of an expert's GPU cost.

    Args:
        work: the layer step.
        refused: GPUs that take no absent expert.
    """
    gpu_s = _gpu_cost_s(work)
    # Twice as fast as `zeros_like`.
    zeros = np.zeros(gpu_s.shape)
    if len(refused):
        gpu_s[refused] = np.where(_absent(work)[refused], np.inf, gpu_s[refused])
    cpu_s, gpu_s = _bounded(_cpu_cost_s(work), gpu_s)
    return Layer(
        cpu_s=cpu_s,
        gpu_s=gpu_s,
        copy_s=zeros,
        landing_s=zeros,
        link_s=zeros[:, 0].copy(),
        first_s=0.0,
        order=np.arange(len(work.experts)),
    )


def _bounded(*costs: np.ndarray) -> tuple[np.ndarray, ...]:
    """`costs` with the infinite ones, of lanes that are no choice, as a number that is
    more than any assignment without them costs.

    The search weighs costs by prices, and zero times infinity is no number.
    """
    if all(np.isfinite(seconds).all() for seconds in costs):
        return costs
    total_s = sum(seconds[np.isfinite(seconds)].sum() for seconds in costs)
    forbidden_s = 1e3 * (1.0 + total_s)
    return tuple(np.minimum(seconds, forbidden_s) for seconds in costs)


def _scheduled(
    work: LayerWork,
    view: MachineView,
) -> Layer:
    """The layer step with its copies, and the launch order of `scheduled_s`."""
    given = kernel_work(work, view)
    coming = flying(given.gpu_state, given.arrive_s)
    landing_s = np.where(coming, work.arrive_s, 0.0)
    copy_s = np.where(coming, 0.0, transfer_s(work))

    # A copy of the GPU's seconds, as the solver takes no read-only array.
    cpu_s, gpu_s, copy_s, landing_s = _bounded(
        _cpu_cost_s(work), np.array(work.gpu_s), copy_s, landing_s
    )

    # Last key first: residents, then by landing, then the longest on the GPU.
    first_landing_s = np.where(coming, work.arrive_s, np.inf).min(axis=0)
    absent = ~_resident_everywhere(work)
    order = np.lexsort((-work.gpu_s[0], first_landing_s, absent))
    return Layer(
        cpu_s=cpu_s,
        gpu_s=gpu_s,
        copy_s=copy_s,
        landing_s=landing_s,
        link_s=np.maximum(landing_s.max(axis=1), link_s(work)),
        first_s=given.first_cpu_s,
        order=order,
    )


def link_s(work: LayerWork) -> np.ndarray:
    """Seconds until each link has ended the copy under way: float64 [G]."""
    return np.zeros(len(work.arrive_s)) if work.link_s is None else work.link_s


def transfer_s(work: LayerWork) -> np.ndarray:
    """`arrive_s` without the wait for the copy under way: float64 [G, A].

    For schedules that let copies follow each other: only the first waits for it.
    """
    wait_s = link_s(work)[:, None]
    # What is in flight lands with the copy under way; what is absent, after it.
    return np.where(work.arrive_s > wait_s, work.arrive_s - wait_s, work.arrive_s)


def _resident_everywhere(work: LayerWork) -> np.ndarray:
    """Bool [A]: experts that no GPU would have to wait for."""
    return (work.arrive_s == 0.0).all(axis=0)


def _solve(layer: Layer, free: int, busy_s: np.ndarray | None = None) -> Optimum:
    """Solve with the first `free` experts of the order sorted by how much their lane
    matters.

    Args:
        layer: costs and launch order.
        free: how many experts may be launched in any order.
        busy_s: float64 [G] until when each GPU is taken before any expert; None where
            all are idle.
    """
    price, regret = lagrangian_prices(layer)

    # Deciding first where it matters most lets the bounds prune early.
    first = layer.order[:free]
    layer.order[:free] = highest_first(first, regret[first])

    remainder = priced_remainder(layer, price)
    if busy_s is None:
        busy_s = np.zeros(len(layer.gpu_s))
    lanes, makespan_s, bound_s = dynamic_program(layer, busy_s, price, remainder)
    return Optimum(makespan_s, lanes, bound_s, layer.order)

"""HybriMoE's prefetch by simulated impact on the coming layers.

A active experts, E experts of a layer, G GPUs, D layers ahead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.assignment import _kernels as _assignment
from moesim.policies.assignment import _list_scheduler
from moesim.policies.assignment._kernels import flying, transfers
from moesim.policies.assignment._list_scheduler import list_schedule
from moesim.policies.base import Evaluations
from moesim.policies.compilation import called
from moesim.policies.kernels import (
    PREFETCH,
    KernelView,
    PrefetchKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect
from moesim.policies.prefetch import _kernels
from moesim.policies.prefetch._compiled import CompiledPrefetch
from moesim.policies.prefetch._kernels import is_present
from moesim.traces.compilation import linked

if TYPE_CHECKING:
    from moesim.traces.format.schema import Phase

# One per layer ahead, nearest first.
_COLUMNS = ("pred1_raw", "pred2_raw", "pred3_raw")

# Differences of makespans are rounded to picoseconds: equal gains must compare equal.
_PICOSECONDS = 1e12

_NO_LIMIT = -1


@called
def _lowest(rows: np.ndarray) -> np.ndarray:
    """The best of each expert's seconds, float64 [1, A] of [G, A]."""
    best = rows[:1].copy()
    for g in range(1, len(rows)):
        for i in range(rows.shape[1]):
            best[0, i] = min(best[0, i], rows[g, i])
    return best


@called
def _any(rows: np.ndarray) -> np.ndarray:
    """What holds on some GPU, bool [1, A] of [G, A]."""
    some = rows[:1].copy()
    for g in range(1, len(rows)):
        for i in range(rows.shape[1]):
            some[0, i] |= rows[g, i]
    return some


@called
def _current_s(work: Work) -> float:
    """Seconds that HybriMoE's schedule gives this layer.

    One GPU stands for all: the best of each expert's times.
    """
    # The scheduler's default reading, R2, with stealing.
    return list_schedule(
        work.tokens,
        work.cpu_s,
        _lowest(work.gpu_s),
        _lowest(transfers(work.arrive_s, work.link_s)),
        _any(flying(work.gpu_state, work.arrive_s)),
        np.array([work.link_s.min()]),
        work.first_cpu_s,
        True,
        True,
    )[2]


@called
def _copies(work: Work, view: KernelView, ends_s: float, experts: int) -> int:
    """How many copies the link could start before this layer ends."""
    copy_s = view.copy_s[work.layer]
    if copy_s <= 0.0:
        # A link that takes no time could bring the whole layer.
        return experts
    return max(0, int(np.ceil((ends_s - view.link_wait_s) / copy_s)))


@called
def _coming_s(
    view: KernelView,
    layer: int,
    tokens: np.ndarray,
    arrive_s: np.ndarray,
    flying_: np.ndarray,
    first_s: float,
) -> float:
    """Seconds that the schedule gives a predicted layer.

    Args:
        view: knows what experts take.
        layer: a coming layer.
        tokens: int32 [A], predicted.
        arrive_s: float64 [A], what must still arrive when the layer begins.
        flying_: bool [A], what of it is under way then.
        first_s: extra seconds of the first CPU expert.
    """
    count = len(tokens)
    cpu_s = np.empty(count)
    gpu_s = np.empty((1, count))
    for i in range(count):
        cpu_s[i] = view.cpu_s[layer, tokens[i]]
        gpu_s[0, i] = view.gpu_s[layer, tokens[i]]
    return list_schedule(
        tokens,
        cpu_s,
        gpu_s,
        arrive_s.copy().reshape(1, count),
        flying_.copy().reshape(1, count),
        np.zeros(1),
        first_s,
        True,
        True,
    )[2]


@called
def _best(
    view: KernelView,
    layer: int,
    tokens: np.ndarray,
    arrive_s: np.ndarray,
    flying_: np.ndarray,
    first_s: float,
    begins_s: float,
    start_s: float,
) -> tuple[float, int]:
    """Gain in seconds and position of the absent expert whose prefetch shortens a
    coming layer most.

    Experts of equal load cost the same everywhere, so the lowest id stands for all of
    them. Arguments as in `_coming_s`, and when the layer begins and the link could
    start the copy, seconds from now.
    """
    best_s = 0.0
    best_position = -1
    # A copy that has not started when its layer begins is dropped.
    if start_s >= begins_s:
        return best_s, best_position
    before_s = _coming_s(view, layer, tokens, arrive_s, flying_, first_s)
    left_s = max(0.0, start_s + view.copy_s[layer] - begins_s)
    load = 1 << 40
    while True:
        # The first absent expert of the next lower load.
        position = -1
        for i in range(len(tokens)):
            if arrive_s[i] <= 0.0 or flying_[i] or tokens[i] >= load:
                continue
            if position < 0 or tokens[i] > tokens[position]:
                position = i
        if position < 0:
            return best_s, best_position
        load = tokens[position]

        arrives_s = arrive_s[position]
        arrive_s[position] = left_s
        flying_[position] = left_s > 0.0
        after_s = _coming_s(view, layer, tokens, arrive_s, flying_, first_s)
        arrive_s[position] = arrives_s
        flying_[position] = False
        gain_s = np.rint((before_s - after_s) * _PICOSECONDS) / _PICOSECONDS
        # Only a larger gain replaces: ties go to the higher load.
        if gain_s > best_s:
            best_s = gain_s
            best_position = position


@called
def _predicted(
    view: KernelView,
    row: int,
    layer: int,
    ids: np.ndarray,
    tokens: np.ndarray,
    arrive_s: np.ndarray,
) -> int:
    """Fill in a coming layer's predicted experts, by predictor `row`; their number."""
    experts = len(ids)
    count = 0
    for expert in range(experts):
        if view.workload[row, expert] == 0:
            continue
        ids[count] = expert
        tokens[count] = view.workload[row, expert]
        # What is on its way to a coming layer is taken for present already.
        there = is_present(view.states, layer * experts + expert)
        arrive_s[count] = 0.0 if there else view.copy_s[layer]
        count += 1
    return count


@called
def _largest_gain(
    work: Work,
    view: KernelView,
    count: np.ndarray,
    tokens: np.ndarray,
    arrive_s: np.ndarray,
    flying_: np.ndarray,
    begins_s: np.ndarray,
    start_s: float,
    discount: float,
) -> tuple[int, int]:
    """Layer ahead, from 0, and position of the most wanted expert; -1 for no gain.

    Arguments as in `_best`, one row for each layer ahead.
    """
    nearest = -1
    position = -1
    most_s = 0.0
    for d in range(len(count)):
        n = count[d]
        gain_s, place = _best(
            view,
            work.layer + 1 + d,
            tokens[d, :n],
            arrive_s[d, :n],
            flying_[d, :n],
            work.first_cpu_s,
            begins_s[d],
            start_s,
        )
        gain_s *= discount**d
        # The first of equals is the nearer layer.
        if gain_s > most_s:
            most_s = gain_s
            nearest = d
            position = place
    return nearest, position


@linked(PREFETCH, _kernels, _assignment, _list_scheduler)
def _by_gain(state: State, work: Work, view: KernelView, named: np.ndarray) -> int:
    layers = len(view.copy_s)
    experts = view.states.shape[1] // layers
    depths = min(len(view.workload), layers - 1 - work.layer)
    if not depths:
        return 0
    ends_s = _current_s(work)
    copies = _copies(work, view, ends_s, experts)
    if state.integers[0] >= 0:
        copies = min(copies, state.integers[0])
    if not copies:
        return 0

    count = np.zeros(depths, np.int64)
    ids = np.empty((depths, experts), np.int64)
    tokens = np.empty((depths, experts), np.int32)
    arrive_s = np.empty((depths, experts))
    flying_ = np.zeros((depths, experts), np.bool_)
    begins_s = np.empty(depths)
    for d in range(depths):
        layer = work.layer + 1 + d
        n = _predicted(view, d, layer, ids[d], tokens[d], arrive_s[d])
        count[d] = n
        begins_s[d] = ends_s + view.gap_s
        ends_s = begins_s[d] + _coming_s(
            view,
            layer,
            tokens[d, :n],
            arrive_s[d, :n],
            flying_[d, :n],
            work.first_cpu_s,
        )
    present = arrive_s == 0.0

    start_s = view.link_wait_s
    wanted = 0
    while wanted < copies:
        d, position = _largest_gain(
            work,
            view,
            count,
            tokens,
            arrive_s,
            flying_,
            begins_s,
            start_s,
            state.numbers[0],
        )
        if d < 0:
            break
        layer = work.layer + 1 + d
        named[wanted] = layer * experts + ids[d, position]
        wanted += 1
        # Later choices build on this one.
        start_s += view.copy_s[layer]
        left_s = max(0.0, start_s - begins_s[d])
        arrive_s[d, position] = left_s
        flying_[d, position] = left_s > 0.0
    if not wanted:
        return 0
    # Naming what is present shields it.
    for d in range(depths):
        for place in np.flatnonzero(present[d, : count[d]]):
            named[wanted] = (work.layer + 1 + d) * experts + ids[d, place]
            wanted += 1
    return wanted


class Impact(CompiledPrefetch):
    """Prefetch, one after another, the expert that shortens a coming layer's simulated
    schedule most.

    Each coming layer's experts and loads are what its gate predicts from this layer's
    input. Impact is the makespan of that layer by HybriMoE's own scheduler less its
    makespan with the expert present, evaluated anew after each choice. It is present
    only if it lands before its layer begins: behind what is queued on the link, and
    after this layer's simulated end, the dense parts and the layers between. What would
    then be under way counts with what is left of its copy, and what would not have
    started counts nothing. Ties go to the nearer layer, the higher load, the lower id;
    nothing is wanted without a gain. As many are wanted as the link could start, behind
    what is queued on it, before this layer's own simulated end. Predicted experts that
    are present are named last, which shields them from being evicted for the others.

    "One at a time whenever the link is idle" means that nothing is promised before it
    starts. So what has not started when the next layer comes is taken back, and the
    gates, which now know more about the layers ahead, choose again; what has not
    started when its own layer comes is dropped.

    Args:
        depth: layers ahead, 1 to 3.
        discount: factor on the gain for each layer further ahead; 1 as the paper has
            none.
        size: most experts per layer step; none for what fits in the link's idle time.
        requeue: whether the queue is chosen anew at every layer (see above); otherwise
            it only grows, as one that has been filled greedily once would.

    Source: HybriMoE, section on prefetching; our reference, section 4.4.
    """

    late = "drop"
    weighs_costs: ClassVar[bool] = True

    def __init__(
        self,
        *,
        depth: int = 3,
        discount: float = 1.0,
        size: int | None = None,
        requeue: bool = True,
    ) -> None:
        expect(1 <= depth <= len(_COLUMNS), "depth", f"1 to {len(_COLUMNS)}", depth)
        expect(0 < discount <= 1, "discount", "0 < discount <= 1", discount)
        expect(size is None or size >= 0, "size", "a number >= 0 or none", size)
        self.discount = discount
        self.size = size
        self.requeue = requeue
        self.needs = _COLUMNS[:depth]
        self.ahead = depth
        most = _NO_LIMIT if size is None else size
        self.brought = PrefetchKernels(
            _by_gain, state(numbers=[discount], integers=[most])
        )

    def evaluations(self, following: int, phase: Phase) -> Evaluations:
        """One gate for each layer ahead."""
        del phase
        return Evaluations(gates=min(len(self.needs), following))

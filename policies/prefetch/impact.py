"""HybriMoE's prefetch by simulated impact on the coming layers.

A active experts, E experts of a layer, G GPUs, D layers ahead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.assignment._list_scheduler import FRONTS, by_load, simulate
from moesim.policies.base import IN_FLIGHT, Evaluations
from moesim.policies.compiled import CompiledPrefetch
from moesim.policies.kernels import (
    PREFETCH,
    KernelView,
    PrefetchKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect
from moesim.policies.prefetch._kernels import is_present

if TYPE_CHECKING:
    from moesim.policies.base import RunContext
    from moesim.traces.format.schema import Phase

# One per layer ahead, nearest first.
_COLUMNS = ("pred1_raw", "pred2_raw", "pred3_raw")

# Differences of makespans are rounded to picoseconds: equal gains must compare equal.
_PICOSECONDS = 1e12

_NO_LIMIT = -1

# No time is negative.
_UNKNOWN = -1.0


# Rows of the state's scores; of three rows, one for each layer ahead.
_CPU_S = 0
_GPU_S = 3
_ARRIVE_S = 6
_LANDS_S = 9
_LINK_S = 10
_GPU_END_S = 11
_BEGINS_S = 12
"""By layer ahead: when it begins, seconds from now,"""
_BEFORE_S = 13
"""its makespan as things stand,"""
_AFTER_S = 14
"""that with its most wanted expert,"""
_GAIN_S = 15
"""what that saves,"""
_LEFT_S = 16
"""and what would be left of the copy when the layer begins: see `_weigh`."""

# Rows of the state's marks, likewise.
_IDS = 0
_TOKENS = 3
_FALLING = 6
_RISING = 9
_FLYING = 12
_PRESENT = 15
_KNOWN = 18
_LANES = 19
_ORDER = 20
_FRONT = 21
_COUNT = 22
_PLACE = 23

_SCORES = 17
_MARKS = 24


@compiled
def _makespan_s(state: State, d: int, cpu_s: np.ndarray, first_s: float) -> float:
    """Seconds that HybriMoE's schedule gives the experts in the rows of a layer ahead.

    One GPU stands for all. The scheduler's default reading, R2, with stealing.
    """
    active = len(cpu_s)
    scores = state.scores
    marks = state.marks
    return simulate(
        falling=marks[_FALLING + d][:active],
        rising=marks[_RISING + d][:active],
        cpu_s=cpu_s,
        gpu_s=scores[_GPU_S + d : _GPU_S + d + 1],
        arrive_s=scores[_ARRIVE_S + d : _ARRIVE_S + d + 1],
        flying=marks[_FLYING + d : _FLYING + d + 1],
        first_s=first_s,
        soonest_end=True,
        stealing=True,
        lands_s=scores[_LANDS_S : _LANDS_S + 1],
        link_s=scores[_LINK_S][:1],
        gpu_end_s=scores[_GPU_END_S][:1],
        known=marks[_KNOWN],
        front=marks[_FRONT],
        lanes=marks[_LANES],
        order=marks[_ORDER],
    )


@compiled
def _current_s(state: State, work: Work) -> float:
    """Seconds that the schedule gives this layer: the best of each expert's times."""
    active = len(work.experts)
    gpu_s = state.scores[_GPU_S]
    arrive_s = state.scores[_ARRIVE_S]
    flying = state.marks[_FLYING]
    for i in range(active):
        gpu_s[i] = np.inf
        arrive_s[i] = np.inf
        flying[i] = 0
        for g in range(len(work.gpu_s)):
            comes_s = work.arrive_s[g, i]
            # A copy that lands this very moment counts as resident.
            if work.gpu_state[g * active + i] == IN_FLIGHT and comes_s > 0.0:
                flying[i] = 1
            # What is absent follows the copy under way.
            if comes_s > work.link_s[g]:
                comes_s -= work.link_s[g]
            gpu_s[i] = min(gpu_s[i], work.gpu_s[g, i])
            arrive_s[i] = min(arrive_s[i], comes_s)
    by_load(work.tokens, state.marks[_FALLING], state.marks[_RISING])
    state.scores[_LINK_S, 0] = work.link_s.min()
    return _makespan_s(state, 0, work.cpu_s, work.first_cpu_s)


@compiled
def _copies(work: Work, view: KernelView, ends_s: float, experts: int) -> int:
    """How many copies the link could start before this layer ends."""
    copy_s = view.copy_s[work.layer]
    if copy_s <= 0.0:
        # A link that takes no time could bring the whole layer.
        return experts
    return max(0, int(np.ceil((ends_s - view.link_wait_s) / copy_s)))


@compiled
def _coming_s(state: State, d: int, first_s: float) -> float:
    """Seconds that the schedule gives a layer ahead, as things stand."""
    active = state.marks[_COUNT, d]
    state.scores[_LINK_S, 0] = 0.0
    return _makespan_s(state, d, state.scores[_CPU_S + d][:active], first_s)


@compiled
def _predict(state: State, view: KernelView, d: int, layer: int, experts: int) -> None:
    """Note the experts of a layer ahead as its predictor names them."""
    marks = state.marks
    scores = state.scores
    count = 0
    for expert in range(experts):
        tokens = view.workload[d, expert]
        if tokens == 0:
            continue
        marks[_IDS + d, count] = expert
        marks[_TOKENS + d, count] = tokens
        # What is on its way to a coming layer is taken for present already.
        there = is_present(view.states, layer * experts + expert)
        marks[_PRESENT + d, count] = there or view.copy_s[layer] == 0.0
        marks[_FLYING + d, count] = 0
        scores[_ARRIVE_S + d, count] = 0.0 if there else view.copy_s[layer]
        scores[_CPU_S + d, count] = view.cpu_s[layer, tokens]
        scores[_GPU_S + d, count] = view.gpu_s[layer, tokens]
        count += 1
    marks[_COUNT, d] = count
    by_load(marks[_TOKENS + d][:count], marks[_FALLING + d], marks[_RISING + d])


@compiled
def _next_lower(state: State, d: int, load: int) -> int:
    """Position of the first absent expert of the highest load below one; -1 if none."""
    tokens = state.marks[_TOKENS + d]
    best = -1
    for i in range(state.marks[_COUNT, d]):
        is_absent = state.scores[_ARRIVE_S + d, i] > 0.0
        if not is_absent or state.marks[_FLYING + d, i] or tokens[i] >= load:
            continue
        if best < 0 or tokens[i] > tokens[best]:
            best = i
    return best


@compiled
def _weigh(state: State, d: int, first_s: float, left_s: float) -> None:
    """Find the absent expert whose prefetch shortens a layer ahead most, if `left_s` of
    its copy is left when the layer begins.

    Experts of equal load cost the same everywhere, so the lowest id stands for all of
    them. Notes the gain, 0 if there is none, and the place.
    """
    scores = state.scores
    scores[_LEFT_S, d] = left_s
    scores[_GAIN_S, d] = 0.0
    load = 1 << 40
    while True:
        position = _next_lower(state, d, load)
        if position < 0:
            return
        load = state.marks[_TOKENS + d, position]

        arrives_s = scores[_ARRIVE_S + d, position]
        scores[_ARRIVE_S + d, position] = left_s
        state.marks[_FLYING + d, position] = left_s > 0.0
        after_s = _coming_s(state, d, first_s)
        scores[_ARRIVE_S + d, position] = arrives_s
        state.marks[_FLYING + d, position] = 0
        gain_s = scores[_BEFORE_S, d] - after_s
        gain_s = np.rint(gain_s * _PICOSECONDS) / _PICOSECONDS
        # Only a larger gain replaces: ties go to the higher load.
        if gain_s > scores[_GAIN_S, d]:
            scores[_GAIN_S, d] = gain_s
            scores[_AFTER_S, d] = after_s
            state.marks[_PLACE, d] = position


@compiled
def _most_wanted(
    state: State, work: Work, view: KernelView, depths: int, start_s: float
) -> int:
    """The layer ahead, from 0, that the next copy would shorten most; -1 for no gain.

    `start_s`: when the link could start the copy, seconds from now.
    """
    scores = state.scores
    nearest = -1
    most_s = 0.0
    for d in range(depths):
        begins_s = scores[_BEGINS_S, d]
        # A copy that has not started when its layer begins is dropped.
        if start_s >= begins_s:
            continue
        left_s = max(0.0, start_s + view.copy_s[work.layer + 1 + d] - begins_s)
        # Mostly nothing is left, and what was found before still holds.
        if left_s != scores[_LEFT_S, d]:
            _weigh(state, d, work.first_cpu_s, left_s)
        gain_s = scores[_GAIN_S, d] * state.numbers[0] ** d
        # The first of equals is the nearer layer.
        if gain_s > most_s:
            most_s = gain_s
            nearest = d
    return nearest


@compiled
def _foresee(
    state: State, work: Work, view: KernelView, depths: int, ends_s: float, experts: int
) -> None:
    """Note what is predicted of the layers ahead, and when they begin."""
    for d in range(depths):
        _predict(state, view, d, work.layer + 1 + d, experts)
        state.scores[_BEGINS_S, d] = ends_s + view.gap_s
        state.scores[_BEFORE_S, d] = _coming_s(state, d, work.first_cpu_s)
        ends_s = state.scores[_BEGINS_S, d] + state.scores[_BEFORE_S, d]
        state.scores[_LEFT_S, d] = _UNKNOWN


@compiled(PREFETCH)
def _by_gain(state: State, work: Work, view: KernelView, named: np.ndarray) -> int:
    layers = len(view.copy_s)
    experts = view.states.shape[1] // layers
    depths = min(len(view.workload), layers - 1 - work.layer)
    if not depths:
        return 0
    ends_s = _current_s(state, work)
    copies = _copies(work, view, ends_s, experts)
    if state.integers[0] >= 0:
        copies = min(copies, state.integers[0])
    if not copies:
        return 0
    _foresee(state, work, view, depths, ends_s, experts)

    scores = state.scores
    marks = state.marks
    start_s = view.link_wait_s
    wanted = 0
    while wanted < copies:
        d = _most_wanted(state, work, view, depths, start_s)
        if d < 0:
            break
        layer = work.layer + 1 + d
        position = marks[_PLACE, d]
        named[wanted] = layer * experts + marks[_IDS + d, position]
        wanted += 1
        # Later choices build on this one.
        start_s += view.copy_s[layer]
        scores[_ARRIVE_S + d, position] = scores[_LEFT_S, d]
        marks[_FLYING + d, position] = scores[_LEFT_S, d] > 0.0
        scores[_BEFORE_S, d] = scores[_AFTER_S, d]
        scores[_LEFT_S, d] = _UNKNOWN
    if not wanted:
        return 0
    # Naming what is present shields it.
    for d in range(depths):
        for place in range(marks[_COUNT, d]):
            if marks[_PRESENT + d, place]:
                first = (work.layer + 1 + d) * experts
                named[wanted] = first + marks[_IDS + d, place]
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

    def start(self, context: RunContext) -> None:
        """Make room for schedules."""
        super().start(context)
        width = max(context.shape.experts, FRONTS)
        most = _NO_LIMIT if self.size is None else self.size
        room = state(
            np.zeros((_SCORES, width)),
            np.zeros((_MARKS, width)),
            numbers=[self.discount],
            integers=[most],
        )
        self.brought = PrefetchKernels(_by_gain, room)

    def evaluations(self, following: int, phase: Phase) -> Evaluations:
        """One gate for each layer ahead."""
        del phase
        return Evaluations(gates=min(len(self.needs), following))

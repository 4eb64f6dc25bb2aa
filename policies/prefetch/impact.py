"""HybriMoE's prefetch by simulated impact on the coming layers.

E experts of a layer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.assignment._list_scheduler import ListScheduler
from moesim.policies.base import PrefetchPolicy
from moesim.policies.names import IN_FLIGHT, NONE
from moesim.policies.parameters import expect
from moesim.policies.prefetch._ranked import is_present
from moesim.policies.run_context import Evaluations

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

# One per layer ahead, nearest first.
_COLUMNS = ("pred1_raw", "pred2_raw", "pred3_raw")

# Differences of makespans are rounded to picoseconds: equal gains must compare equal.
_PICOSECONDS = 1e12

_NO_LIMIT = 1 << 62
_INF = math.inf

# No time is negative.
_UNKNOWN = -1.0


class LayerAhead:
    """A coming layer as its predictor names it, and what its schedule takes.

    One GPU stands for all.

    Attributes:
        count: experts that are predicted.
        ids, tokens, present: int32 and int8 [E], of those.
        begins_s: seconds from now until the layer begins.
        before_s: its makespan as things stand.
        place: the most wanted expert.
        after_s, gain_s: the makespan with it, and what that saves; 0 for nobody.
        left_s: what would be left of its copy when the layer begins.
    """

    def __init__(self, experts: int) -> None:
        self.layer = self.count = self.place = 0
        self.copy_s = self.begins_s = self.before_s = self.after_s = 0.0
        self.gain_s = self.left_s = 0.0
        self.ids: Ints = zeros(experts, np.int32)
        self.tokens: Ints = zeros(experts, np.int32)
        self.present: Ints = zeros(experts, np.int8)
        self.cpu_s: Floats = zeros(experts)
        self.gpu_s: Floats = zeros((1, experts))
        self.lanes: Ints = zeros(experts, np.int8)
        self.order: Ints = zeros(experts, np.int64)
        self.schedule = ListScheduler(1, experts)
        self.schedule.cpu_s = self.cpu_s
        self.schedule.gpu_s = self.gpu_s

    def predict(self, view: MachineView, depth: int, layer: int) -> None:
        """Note the experts of a layer as its predictor names them."""
        self.layer = layer
        self.copy_s = view.copy_s[layer]
        count = 0
        for expert in range(view.experts):
            tokens = view.workload[depth, expert]
            if tokens == 0:
                continue
            self.ids[count] = expert
            self.tokens[count] = tokens
            # What is on its way to a coming layer is taken for present already.
            there = is_present(view, layer * view.experts + expert)
            self.present[count] = there or self.copy_s == 0.0
            self.schedule.flying[0, count] = 0
            self.schedule.arrive_s[0, count] = 0.0 if there else self.copy_s
            self.cpu_s[count] = view.cpu_s[layer, tokens]
            self.gpu_s[0, count] = view.gpu_s[layer, tokens]
            count += 1
        self.count = count
        self.schedule.sort(self.tokens, count)

    def makespan_s(self, first_s: float) -> float:
        """Seconds that HybriMoE's schedule gives the layer."""
        self.schedule.link_s[0] = 0.0
        return self.schedule.simulate(self.count, first_s, self.lanes, self.order)

    def weigh(self, first_s: float, left_s: float) -> None:
        """Find the absent expert whose prefetch shortens the layer most, if `left_s` of
        its copy is left when the layer begins.

        Experts of equal load cost the same, but ties between them go by id, and what
        is present, under way or fetched by the schedule itself is not the same to all
        lanes: so each is tried.
        """
        schedule = self.schedule
        self.left_s = left_s
        self.gain_s = 0.0
        for n in range(self.count):
            place = schedule.falling[n]
            arrive_s = schedule.arrive_s[0, place]
            if arrive_s == 0.0 or schedule.flying[0, place]:
                continue
            schedule.arrive_s[0, place] = left_s
            schedule.flying[0, place] = left_s > 0.0
            after_s = self.makespan_s(first_s)
            schedule.arrive_s[0, place] = arrive_s
            schedule.flying[0, place] = 0
            gain_s = round((self.before_s - after_s) * _PICOSECONDS) / _PICOSECONDS
            # Only a larger gain replaces: ties go to the higher load, the lower id.
            if gain_s > self.gain_s:
                self.gain_s = gain_s
                self.after_s = after_s
                self.place = place

    def take(self) -> None:
        """Count on the most wanted expert from now on."""
        self.schedule.arrive_s[0, self.place] = self.left_s
        self.schedule.flying[0, self.place] = self.left_s > 0.0
        self.before_s = self.after_s
        self.left_s = _UNKNOWN


class Impact(PrefetchPolicy):
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
        self.most = _NO_LIMIT if size is None else size
        self.requeue = requeue
        self.needs = _COLUMNS[:depth]

    def start(self, context: RunContext) -> None:
        """Make room for schedules."""
        experts = context.shape.experts
        self.ahead = [LayerAhead(experts) for _ in self.needs]
        self.gpu_s: Floats = zeros((1, experts))
        self.lanes: Ints = zeros(experts, np.int8)
        self.order: Ints = zeros(experts, np.int64)
        self.schedule = ListScheduler(1, experts)

    def evaluations(self, following: int, phase: int) -> Evaluations:
        """One gate for each layer ahead."""
        del phase
        return Evaluations(gates=min(len(self.needs), following))

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        depths = min(len(view.workload), view.layers - 1 - work.layer)
        if not depths:
            return 0
        ends_s = self._current_s(work)
        copies = min(self.most, self._copies(work, view, ends_s))
        if not copies:
            return 0
        self._foresee(work, view, depths, ends_s)
        start_s = view.link_wait_s
        wanted = 0
        while wanted < copies:
            d = self._most_wanted(work, depths, start_s)
            if d < 0:
                break
            ahead = self.ahead[d]
            named[wanted] = ahead.layer * view.experts + ahead.ids[ahead.place]
            wanted += 1
            # Later choices build on this one.
            start_s += ahead.copy_s
            ahead.take()
        if not wanted:
            return 0
        # Naming what is present shields it.
        for d in range(depths):
            ahead = self.ahead[d]
            for place in range(ahead.count):
                if ahead.present[place]:
                    named[wanted] = ahead.layer * view.experts + ahead.ids[place]
                    wanted += 1
        return wanted

    def _current_s(self, work: Work) -> float:
        """Seconds that the schedule gives this layer: the best of each expert's
        times.
        """
        schedule = self.schedule
        for i in range(work.active):
            gpu_s = arrive_s = _INF
            schedule.flying[0, i] = 0
            for g in range(work.gpus):
                comes_s = work.arrive_s[g, i]
                # A copy that lands this very moment counts as resident.
                if work.gpu_state[g, i] == IN_FLIGHT and comes_s > 0.0:
                    schedule.flying[0, i] = 1
                # What is absent follows the copy under way.
                if comes_s > work.link_s[g]:
                    comes_s -= work.link_s[g]
                gpu_s = min(gpu_s, work.gpu_s[g, i])
                arrive_s = min(arrive_s, comes_s)
            self.gpu_s[0, i] = gpu_s
            schedule.arrive_s[0, i] = arrive_s
        schedule.cpu_s = work.cpu_s
        schedule.gpu_s = self.gpu_s
        schedule.link_s[0] = work.link_s[0]
        for g in range(1, work.gpus):
            schedule.link_s[0] = min(schedule.link_s[0], work.link_s[g])
        schedule.sort(work.tokens, work.active)
        return schedule.simulate(work.active, work.first_cpu_s, self.lanes, self.order)

    def _copies(self, work: Work, view: MachineView, ends_s: float) -> int:
        """How many copies the link could start before this layer ends."""
        copy_s = view.copy_s[work.layer]
        if copy_s <= 0.0:
            # A link that takes no time could bring the whole layer.
            return view.experts
        copies = (ends_s - view.link_wait_s) / copy_s
        return max(0, int(math.ceil(copies)))  # noqa: RUF046 - C's is a float

    def _foresee(
        self, work: Work, view: MachineView, depths: int, ends_s: float
    ) -> None:
        """Note what is predicted of the layers ahead, and when they begin."""
        for d in range(depths):
            ahead = self.ahead[d]
            ahead.predict(view, d, work.layer + 1 + d)
            ahead.begins_s = ends_s + view.gap_s
            ahead.before_s = ahead.makespan_s(work.first_cpu_s)
            ends_s = ahead.begins_s + ahead.before_s
            ahead.left_s = _UNKNOWN

    def _most_wanted(self, work: Work, depths: int, start_s: float) -> int:
        """The layer ahead, from 0, that the next copy would shorten most; -1 for no
        gain. `start_s`: when the link could start the copy, seconds from now.
        """
        nearest = NONE
        most_s = 0.0
        for d in range(depths):
            ahead = self.ahead[d]
            # A copy that has not started when its layer begins is dropped.
            if start_s >= ahead.begins_s:
                continue
            left_s = max(0.0, start_s + ahead.copy_s - ahead.begins_s)
            # Mostly nothing is left, and what was found before still holds.
            if left_s != ahead.left_s:
                ahead.weigh(work.first_cpu_s, left_s)
            gain_s = ahead.gain_s * self.discount**d
            # The first of equals is the nearer layer.
            if gain_s > most_s:
                most_s = gain_s
                nearest = d
        return nearest

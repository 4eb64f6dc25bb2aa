"""HybriMoE's prefetch by simulated impact on the coming layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.assignment._gpu_choice import (
    first_cpu_s,
    in_flight,
    link_s,
    transfer_s,
)
from moesim.policies.assignment._list_scheduler import list_schedule
from moesim.policies.base import Evaluations, ExpertKey, PrefetchPolicy
from moesim.policies.parameters import expect
from moesim.policies.planner.resident_mask import present
from moesim.policies.prefetch._kernels import predicted_workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView
    from moesim.traces.format.schema import Phase

# One per layer ahead, nearest first.
_COLUMNS = ("pred1_raw", "pred2_raw", "pred3_raw")

# The scheduler's default reading, R2, with stealing. Keywords would cost a microsecond
# in each of many calls (measured).
_RULE = (True, True)

# Differences of makespans are rounded to picoseconds: equal gains must compare equal.
_GAIN_DIGITS = 12


@dataclass(slots=True)
class _Layer:
    """Work of a layer, actual or predicted; arrays over its experts as in `LayerWork`,
    of one GPU.

    Attributes:
        flying: bool [1, A], copies that will not have landed when the layer begins.
        begins_s: seconds until the layer begins, as expected.
    """

    layer: int
    experts: np.ndarray
    tokens: np.ndarray
    cpu_s: np.ndarray
    gpu_s: np.ndarray
    arrive_s: np.ndarray
    flying: np.ndarray
    link_s: np.ndarray
    first_s: float
    weight: float = 1.0
    begins_s: float = 0.0

    def makespan_s(self, arrive_s: np.ndarray, flying: np.ndarray) -> float:
        """Seconds HybriMoE's schedule takes, given what must still arrive (float64 [1,
        A]) and what of it is under way (bool [1, A]).
        """
        schedule = list_schedule(
            self.tokens,
            self.cpu_s,
            self.gpu_s,
            arrive_s,
            flying,
            self.link_s,
            self.first_s,
            *_RULE,
        )
        return schedule[2]

    def best(self, start_s: float, copy_s: float) -> tuple[float, int]:
        """Weighted gain in seconds and position of the absent expert whose prefetch
        shortens this layer most.

        Experts of equal load cost the same everywhere, so the lowest id stands for all
        of them.

        Args:
            start_s: when the link could start the copy, seconds from now.
            copy_s: seconds that it takes.
        """
        # A copy that has not started when its layer begins is dropped.
        if start_s >= self.begins_s:
            return 0.0, -1
        before_s = self.makespan_s(self.arrive_s, self.flying)
        absent = np.flatnonzero((self.arrive_s > 0.0) & ~self.flying)
        best_s = 0.0
        best_position = -1
        # From the highest load down, and only a larger gain replaces: ties go to it.
        _, first_of_load = np.unique(self.tokens[absent], return_index=True)
        for first in first_of_load[::-1]:
            position = int(absent[first])
            after_s = self.makespan_s(*self._with(position, start_s + copy_s))
            gain_s = round(before_s - after_s, _GAIN_DIGITS)
            if gain_s > best_s:
                best_s = gain_s
                best_position = position
        return best_s * self.weight, best_position

    def choose(self, position: int, lands_s: float) -> None:
        """Let later choices build on a copy of this expert that lands at `lands_s`."""
        self.arrive_s, self.flying = self._with(position, lands_s)

    def _with(self, position: int, lands_s: float) -> tuple[np.ndarray, np.ndarray]:
        """`arrive_s` and `flying` when the layer begins, if an expert lands then."""
        left_s = max(0.0, lands_s - self.begins_s)
        arrive_s = self.arrive_s.copy()
        arrive_s[0, position] = left_s
        flying = self.flying.copy()
        flying[0, position] = left_s > 0.0
        return arrive_s, flying


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
        self.size = size
        self.requeue = requeue
        self.needs = _COLUMNS[:depth]

    def evaluations(self, following: int, phase: Phase) -> Evaluations:
        """One gate for each layer ahead."""
        del phase
        return Evaluations(gates=min(len(self.needs), following))

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Choose greedily among all coming layers."""
        following = view.layers - 1 - work.layer
        last = min(len(self.needs), following)
        if not last:
            return ()
        current = self._current(work, view)
        begins_s = current.makespan_s(current.arrive_s, current.flying)
        copies = self._possible_copies(begins_s, work, view)
        if not copies:
            return ()

        coming = []
        for depth in range(1, last + 1):
            layer = self._predict(work, view, depth)
            begins_s += view.gap_s
            layer.begins_s = begins_s
            begins_s += layer.makespan_s(layer.arrive_s, layer.flying)
            coming.append(layer)
        shielded = [
            ExpertKey(layer.layer, expert)
            for layer in coming
            for expert in layer.experts[layer.arrive_s[0] == 0.0].tolist()
        ]
        keys = self._choose(coming, copies, view)
        return keys + shielded if keys else ()

    def _choose(
        self, coming: list[_Layer], copies: int, view: MachineView
    ) -> list[ExpertKey]:
        """Take the copy of the largest gain, again and again."""
        keys: list[ExpertKey] = []
        start_s = view.link_wait_s()
        while len(keys) < copies:
            gains = [layer.best(start_s, view.copy_s(layer.layer)) for layer in coming]
            # `max` takes the first of equals: the nearer layer.
            n = max(range(len(coming)), key=lambda k: gains[k][0])
            gain_s, position = gains[n]
            if gain_s <= 0.0:
                break
            chosen = coming[n]
            keys.append(ExpertKey(chosen.layer, int(chosen.experts[position])))
            start_s += view.copy_s(chosen.layer)
            chosen.choose(position, start_s)
        return keys

    def _current(self, work: LayerWork, view: MachineView) -> _Layer:
        """This layer. One GPU stands for all: the best of each expert's times."""
        return _Layer(
            layer=work.layer,
            experts=work.experts,
            tokens=work.tokens,
            cpu_s=work.cpu_s,
            gpu_s=work.gpu_s.min(axis=0, keepdims=True),
            arrive_s=transfer_s(work).min(axis=0, keepdims=True),
            flying=in_flight(work, view).max(axis=0, keepdims=True),
            link_s=link_s(work).min(keepdims=True),
            first_s=first_cpu_s(view),
        )

    def _possible_copies(
        self,
        ends_s: float,
        work: LayerWork,
        view: MachineView,
    ) -> int:
        """How many copies the link could start before this layer ends."""
        copy_s = view.copy_s(work.layer)
        idle_s = ends_s - view.link_wait_s()
        # A link that takes no time could bring the whole layer.
        copies = view.experts
        if copy_s > 0.0:
            copies = max(0, int(np.ceil(idle_s / copy_s)))
        return copies if self.size is None else min(copies, self.size)

    def _predict(
        self,
        work: LayerWork,
        view: MachineView,
        depth: int,
    ) -> _Layer:
        """The layer `depth` layers on, as its gate predicts it from this input."""
        layer = work.layer + depth
        scores = work.predicted[self.needs[depth - 1]].astype(np.float32)
        workload = predicted_workload(scores, work.routing.shape[1])
        experts = np.flatnonzero(workload)
        tokens = workload[experts].astype(np.int32)
        is_present = present(view, layer)[experts]
        arrive_s = np.where(is_present, 0.0, view.copy_s(layer))
        return _Layer(
            layer=layer,
            experts=experts,
            tokens=tokens,
            cpu_s=view.cpu_s(layer, tokens),
            gpu_s=view.gpu_s(layer, tokens)[None],
            arrive_s=arrive_s[None],
            # What is on its way to a coming layer is taken for present already.
            flying=np.zeros((1, len(experts)), np.bool_),
            link_s=np.zeros(1),
            first_s=first_cpu_s(view),
            weight=self.discount ** (depth - 1),
        )

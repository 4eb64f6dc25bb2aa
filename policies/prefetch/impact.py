"""HybriMoE's prefetch by simulated impact on the coming layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.assignment._gpu_choice import first_cpu_s
from moesim.policies.assignment._list_scheduler import list_schedule
from moesim.policies.base import ExpertKey, PrefetchPolicy
from moesim.policies.parameters import expect
from moesim.policies.planner.resident_mask import present
from moesim.policies.prefetch._kernels import predicted_workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView

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
    """

    layer: int
    experts: np.ndarray
    tokens: np.ndarray
    cpu_s: np.ndarray
    gpu_s: np.ndarray
    arrive_s: np.ndarray
    first_s: float
    weight: float = 1.0

    def makespan_s(self, arrive_s: np.ndarray) -> float:
        """Seconds HybriMoE's schedule takes, given what must still arrive (float64 [1,
        A]).
        """
        # What is on its way to a coming layer is taken for present already.
        flying = np.zeros_like(arrive_s, dtype=np.bool_)
        schedule = list_schedule(
            self.tokens,
            self.cpu_s,
            self.gpu_s,
            arrive_s,
            flying,
            self.first_s,
            *_RULE,
        )
        return schedule[2]

    def best(self) -> tuple[float, int]:
        """Weighted gain in seconds and position of the absent expert whose presence
        shortens this layer most.

        Experts of equal load cost the same everywhere, so the lowest id stands for all
        of them.
        """
        before_s = self.makespan_s(self.arrive_s)
        absent = np.flatnonzero(self.arrive_s[0])
        best_s = 0.0
        best_position = -1
        # From the highest load down, and only a larger gain replaces: ties go to it.
        _, first_of_load = np.unique(self.tokens[absent], return_index=True)
        for first in first_of_load[::-1]:
            position = int(absent[first])
            arrive_s = self.arrive_s.copy()
            arrive_s[0, position] = 0.0
            gain_s = round(before_s - self.makespan_s(arrive_s), _GAIN_DIGITS)
            if gain_s > best_s:
                best_s = gain_s
                best_position = position
        return best_s * self.weight, best_position


class Impact(PrefetchPolicy):
    """Prefetch, one after another, the expert that shortens a coming layer's simulated
    schedule most.

    Each coming layer's experts and loads are what its gate predicts from this layer's
    input. Impact is the makespan of that layer by HybriMoE's own scheduler less its
    makespan with the expert present, evaluated anew in the chosen layer after each
    choice. Ties go to the nearer layer, the higher load, the lower id; nothing is
    wanted without a gain. As many are wanted as the link could start, behind what is
    queued on it, before this layer's own simulated end. Predicted experts that are
    present are named last, which shields them from being evicted for the others.

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

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Choose greedily among all coming layers."""
        following = view.layers - 1 - work.layer
        last = min(len(self.needs), following)
        copies = self._possible_copies(work, view) if last else 0
        if not copies:
            return ()

        coming = [self._predict(work, view, depth) for depth in range(1, last + 1)]
        shielded = [
            ExpertKey(layer.layer, expert)
            for layer in coming
            for expert in layer.experts[layer.arrive_s[0] == 0.0].tolist()
        ]
        best = [layer.best() for layer in coming]
        keys: list[ExpertKey] = []
        while len(keys) < copies:
            # `max` takes the first of equals: the nearer layer.
            n = max(range(last), key=lambda k: best[k][0])
            gain_s, position = best[n]
            if gain_s <= 0.0:
                break
            chosen = coming[n]
            expert = int(chosen.experts[position])
            keys.append(ExpertKey(chosen.layer, expert))
            # As if it were there: the next choice builds on this one.
            chosen.arrive_s[0, position] = 0.0
            best[n] = chosen.best()
        return keys + shielded if keys else ()

    def _possible_copies(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> int:
        """How many copies the link could start before this layer ends."""
        # One GPU stands for all: the best of each expert's times.
        nearest_s = work.arrive_s.min(axis=0, keepdims=True)
        current = _Layer(
            layer=work.layer,
            experts=work.experts,
            tokens=work.tokens,
            cpu_s=work.cpu_s,
            gpu_s=work.gpu_s.min(axis=0, keepdims=True),
            arrive_s=nearest_s,
            first_s=first_cpu_s(view),
        )
        copy_s = view.copy_s(work.layer)
        idle_s = current.makespan_s(nearest_s) - view.link_wait_s()
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
            first_s=first_cpu_s(view),
            weight=self.discount ** (depth - 1),
        )

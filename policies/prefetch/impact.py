"""HybriMoE's prefetch: bring what shortens a coming layer most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.assignment._gpu_choice import first_cpu_s
from moesim.policies.assignment._list_scheduler import rehearse
from moesim.policies.base import ExpertKey, PrefetchPolicy
from moesim.policies.kernels import predicted_workload
from moesim.policies.parameters import expect
from moesim.policies.planner.resident_mask import present

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView

_COLUMNS = ("pred1_raw", "pred2_raw", "pred3_raw")


@dataclass(slots=True)
class _Layer:
    """What a layer asks for, or is predicted to; arrays over its experts as in
    `LayerWork`, of one GPU.
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
        flying = np.zeros_like(arrive_s, dtype=np.bool_)
        return rehearse(
            self.tokens,
            self.cpu_s,
            self.gpu_s,
            arrive_s,
            flying,
            self.first_s,
            True,
            True,
        )[2]

    def best(self) -> tuple[float, int]:
        """Weighted gain in seconds and position of the absent expert whose presence
        shortens this layer most.

        Experts of equal load cost the same everywhere, so the lowest id speaks for all
        of them.
        """
        before_s = self.makespan_s(self.arrive_s)
        absent = np.flatnonzero(self.arrive_s[0])
        best_s = 0.0
        best_place = -1
        for first in np.unique(self.tokens[absent], return_index=True)[1][::-1]:
            place = int(absent[first])
            arrive_s = self.arrive_s.copy()
            arrive_s[0, place] = 0.0
            gain_s = round(before_s - self.makespan_s(arrive_s), 12)
            if gain_s > best_s:
                best_s = gain_s
                best_place = place
        return best_s * self.weight, best_place


class Impact(PrefetchPolicy):
    """Prefetch, one after another, the expert that shortens a coming layer's simulated
    schedule most.

    Each coming layer's experts and loads are what its gate says of this layer's input.
    Impact is the makespan of that layer by HybriMoE's own scheduler less its makespan
    with the expert present, evaluated anew in the chosen layer after each choice. Ties
    go to the nearer layer, the higher load, the lower id; nothing is wanted without a
    gain. As many are wanted as the link could start, behind what is queued on it,
    before this layer's own simulated end. Predicted experts that are present are named
    last, which shields them from being evicted for the others.

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

    def prefetch(self, work: LayerWork, view: MachineView) -> Sequence[ExpertKey]:
        """Choose greedily among all coming layers."""
        last = min(len(self.needs), view.layers - 1 - work.layer)
        room = self._room(work, view) if last else 0
        if not room:
            return ()
        ahead = [self._predict(work, view, n) for n in range(1, last + 1)]
        kept = [
            ExpertKey(a.layer, e)
            for a in ahead
            for e in a.experts[a.arrive_s[0] == 0.0].tolist()
        ]
        best = [a.best() for a in ahead]
        wanted: list[ExpertKey] = []
        while len(wanted) < room:
            n = max(range(last), key=lambda k: best[k][0])
            gain_s, place = best[n]
            if gain_s <= 0.0:
                break
            wanted.append(ExpertKey(ahead[n].layer, int(ahead[n].experts[place])))
            ahead[n].arrive_s[0, place] = 0.0
            best[n] = ahead[n].best()
        return wanted + kept if wanted else ()

    def _room(self, work: LayerWork, view: MachineView) -> int:
        """How many copies the link could start before this layer ends."""
        fastest_s = work.gpu_s.min(axis=0, keepdims=True)
        nearest_s = work.arrive_s.min(axis=0, keepdims=True)
        now = _Layer(
            work.layer,
            work.experts,
            work.tokens,
            work.cpu_s,
            fastest_s,
            nearest_s,
            first_cpu_s(view),
        )
        copy_s = view.copy_s(work.layer)
        idle_s = now.makespan_s(nearest_s) - view.link_wait_s()
        room = max(0, int(np.ceil(idle_s / copy_s))) if copy_s > 0.0 else view.experts
        return room if self.size is None else min(room, self.size)

    def _predict(self, work: LayerWork, view: MachineView, ahead: int) -> _Layer:
        layer = work.layer + ahead
        scores = work.predicted[self.needs[ahead - 1]].astype(np.float32)
        workload = predicted_workload(scores, work.routing.shape[1])
        experts = np.flatnonzero(workload)
        tokens = workload[experts].astype(np.int32)
        return _Layer(
            layer,
            experts,
            tokens,
            view.cpu_s(layer, tokens),
            view.gpu_s(layer, tokens)[None],
            np.where(present(view, layer)[experts], 0.0, view.copy_s(layer))[None],
            first_cpu_s(view),
            self.discount ** (ahead - 1),
        )

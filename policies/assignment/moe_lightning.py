"""MoE-Lightning's offline search: one split per layer, for average workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.assignment._gpu_choice import gpu_lanes
from moesim.policies.base import (
    Assignment,
    AssignmentPolicy,
    LayerWork,
    MachineView,
    RunContext,
)
from moesim.policies.parameters import expect
from moesim.policies.ranking import ranked

if TYPE_CHECKING:
    from moesim.traces.format.schema import Phase

# Keeps the division by an activation probability of zero harmless.
_SMALLEST = 1e-12


class MoELightning(AssignmentPolicy):
    """Decide, before a layer's first step, which experts are streamed to the GPU for
    the whole run; the CPU computes the rest.

    Experts that are resident at that moment stay on the GPU (give it a static cache).
    Of the others the most popular are streamed, as many as minimise ``max(T_cpu, T_gpu,
    T_link)`` for the average step, ties to fewer. In an average step of T tokens an
    expert of popularity p, the share of all choices that fall on it, is active with
    probability ``a = 1 - (1 - K p) ** T`` and then has ``T K p / a`` tokens; its costs
    count a times. Prefill and decode have plans of their own. An expert that became
    resident since is computed where it is.

    Departures: the paper also searches batch, micro-batch and where attention runs,
    which a trace replay has fixed; and it streams whole layers page by page, where here
    only active experts move.

    Args:
        tokens: T; none takes the tokens of the first step of each phase.

    Source: MoE-Lightning (arXiv 2411.11217), reduced as in `reference/algorithms.md`
    §6.10. Popularity comes from the calibration trace; without one all experts are
    equally popular.
    """

    def __init__(self, *, tokens: int | None = None) -> None:
        expect(tokens is None or tokens >= 1, "tokens", "a number >= 1 or none", tokens)
        self.tokens = tokens
        self._plans: dict[tuple[Phase, int], np.ndarray] = {}
        self._tokens: dict[Phase, int] = {}

    def start(self, context: RunContext) -> None:
        """Turn calibration counts into popularity."""
        shape = context.shape
        counts = np.ones((shape.layers, shape.experts))
        if context.calibration is not None:
            counts = np.asarray(context.calibration, np.float64)
        total = counts.sum(axis=1, keepdims=True)
        # A layer that the calibration never reached counts as uniform.
        popularity = counts / np.maximum(total, 1.0)
        self._popularity = np.where(total > 0.0, popularity, 1.0 / shape.experts)

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Follow the plan of this layer and phase, in ascending expert id."""
        key = (work.phase, work.layer)
        plan = self._plans.get(key)
        if plan is None:
            # One T for all layers of a phase, though they are planned one by one.
            first = self._tokens.setdefault(work.phase, max(1, len(work.routing)))
            plan = self._search(work.layer, self.tokens or first, view)
            self._plans[key] = plan

        resident = work.arrive_s == 0.0
        streamed = plan[work.experts]
        on_gpu = streamed | resident.any(axis=0)
        return Assignment(gpu_lanes(work, on_gpu, streamed | resident))

    def _search(
        self,
        layer: int,
        tokens: int,
        view: MachineView,
    ) -> np.ndarray:
        """Bool [E]: the experts that belong on a GPU."""
        chosen_share = np.minimum(1.0, view.shape.top_k * self._popularity[layer])
        active = 1.0 - (1.0 - chosen_share) ** tokens
        workload = tokens * chosen_share / np.maximum(active, _SMALLEST)
        mean = np.maximum(1, np.rint(workload).astype(np.int64))
        cpu_s = active * view.cpu_s(layer, mean)
        gpu_s = active * view.gpu_s(layer, mean)
        copy_s = active * view.copy_s(layer)

        resident = [view.resident(layer, gpu) for gpu in range(view.gpus)]
        on_gpu = np.any(resident, axis=0)
        rank = ranked(chosen_share)
        rank = rank[~on_gpu[rank]]

        # Entry n: seconds of each lane when the n most popular absent are streamed.
        link = _running_sum(copy_s[rank])
        gpu = gpu_s[on_gpu].sum() + _running_sum(gpu_s[rank])
        cpu = cpu_s[rank].sum() - _running_sum(cpu_s[rank])
        slowest = np.maximum(cpu, np.maximum(gpu, link) / view.gpus)
        on_gpu[rank[: np.argmin(slowest)]] = True
        return on_gpu


def _running_sum(seconds: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, … n entries: float64 [n + 1]."""
    return np.concatenate(([0.0], np.cumsum(seconds)))

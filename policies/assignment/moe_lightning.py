"""MoE-Lightning's offline search: one split per layer, for average workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.assignment._gpu_choice import allowed_lanes
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
    from moesim.policies.base import MachineView, RunContext
    from moesim.traces.format.schema import Phase


class MoELightning(AssignmentPolicy):
    """Decide, before a layer's first step, which experts are streamed to the GPU for
    the whole run; the CPU computes the rest.

    The plan is that of `moesim.policies.assignment.moe_lightning`: residents stay on
    the GPU (give it a static cache), and of the others as many are streamed as balance
    CPU, GPU and link. Prefill and decode have plans of their own. An expert that became
    resident since is computed where it is. The prefetch policy of the same name streams
    ahead.

    Departures: the paper also searches batch, micro-batch and where attention runs,
    which a trace replay has fixed.

    Args:
        tokens: tokens of the average step; none takes those of the first step of each
            phase.
        undivided: a layer's absent experts are all streamed or all left to the CPU, as
            the paper's search has one binary for the place of the FFN; the default, a
            split of them, is better than that.

    Source: MoE-Lightning (arXiv 2411.11217), section on its performance
    model.
    """

    def __init__(self, *, tokens: int | None = None, undivided: bool = False) -> None:
        expect(tokens is None or tokens >= 1, "tokens", "a number >= 1 or none", tokens)
        self.tokens = tokens
        self.undivided = undivided

    def start(self, context: RunContext) -> None:
        """Begin without plans."""
        self._split = StaticSplit(context, self.tokens, undivided=self.undivided)

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Follow the plan of this layer and phase, in ascending expert id."""
        plan = self._split.of(work.phase, work.layer, len(work.routing), view)
        resident = work.arrive_s == 0.0
        streamed = plan[work.experts]
        return Assignment(allowed_lanes(work, streamed | resident))


# Keeps the division by an activation probability of zero harmless.
_SMALLEST = 1e-12


class StaticSplit:
    """Plans of all layers and phases, each made when it is first asked for.

    Experts that are resident at that moment stay on the GPU. Of the others the most
    popular are streamed, as many as minimise ``max(T_cpu, T_gpu, T_link)`` for the
    average step, ties to fewer. In an average step of T tokens an expert of popularity
    p, the share of all choices that fall on it, is active with probability ``a = 1 - (1
    - K p) ** T`` and then has ``T K p / a`` tokens; its costs count a times. Popularity
    comes from the calibration trace; without one all experts are equally popular.

    Args:
        context: sizes and calibration.
        tokens: T; None takes the tokens that a phase is first asked for with.
        undivided: stream all absent experts of a layer or none.
    """

    def __init__(
        self, context: RunContext, tokens: int | None, *, undivided: bool = False
    ) -> None:
        shape = context.shape
        counts = np.ones((shape.layers, shape.experts))
        if context.calibration is not None:
            counts = np.asarray(context.calibration, np.float64)
        total = counts.sum(axis=1, keepdims=True)
        # A layer that the calibration never reached counts as uniform.
        popularity = counts / np.maximum(total, 1.0)
        self._popularity = np.where(total > 0.0, popularity, 1.0 / shape.experts)
        self._stated = tokens
        self._undivided = undivided
        self._plans: dict[tuple[Phase, int], np.ndarray] = {}
        self._tokens: dict[Phase, int] = {}

    def of(
        self, phase: Phase, layer: int, tokens: int, view: MachineView
    ) -> np.ndarray:
        """Bool [E]: the experts that belong on a GPU, for a step of so many tokens."""
        plan = self._plans.get((phase, layer))
        if plan is None:
            # One T for all layers of a phase, though they are planned one by one.
            first = self._tokens.setdefault(phase, max(1, tokens))
            plan = self._search(layer, self._stated or first, view)
            self._plans[phase, layer] = plan
        return plan

    def _search(
        self,
        layer: int,
        tokens: int,
        view: MachineView,
    ) -> np.ndarray:
        """The plan of a layer, bool [E]."""
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
        if self._undivided:
            # Neither lane may be given a part.
            slowest[1:-1] = np.inf
        on_gpu[rank[: np.argmin(slowest)]] = True
        return on_gpu


def _running_sum(seconds: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, … n entries: float64 [n + 1]."""
    return np.concatenate(([0.0], np.cumsum(seconds)))

"""MoE-Lightning's offline search: one split per layer, for average workloads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import view_of, zeros
from moesim.policies.assignment._placing import SpreadAssignment
from moesim.policies.names import PREFILL, RESIDENT
from moesim.policies.parameters import expect
from moesim.policies.ranking import ranked

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

# Keeps the division by an activation probability of zero harmless.
SMALLEST = 1e-12

MOST_TOKENS = 1 << 13
"""Tokens of the largest step that is planned for; larger ones have its plan."""


class SplitPlan:
    """Which experts belong on a GPU in the average step of each layer and phase.

    Experts that are resident when a layer is planned stay on the GPU. Of the others the
    most popular are streamed, as many as minimise ``max(T_cpu, T_gpu, T_link)`` for the
    average step, ties to fewer. In an average step of T tokens an expert of popularity
    p, the share of all choices that fall on it, is active with probability ``a = 1 - (1
    - K p) ** T`` and then has ``T K p / a`` tokens; its costs count a times. Popularity
    comes from the calibration trace; without one all experts are equally popular.

    Attributes:
        on_gpu: uint8 [2, L * E], by phase and flat key; ask `plan` first.
    """

    def __init__(
        self, context: RunContext, tokens: int | None, *, undivided: bool = False
    ) -> None:
        """Begin without plans.

        Args:
            context: sizes, costs and calibration.
            tokens: T; None takes the tokens that a phase is first asked for with.
            undivided: stream all absent experts of a layer or none.
        """
        shape = context.shape
        self.experts = shape.experts
        self.top_k = shape.top_k
        self.undivided = undivided
        counts = np.ones((shape.layers, shape.experts))
        if context.calibration is not None:
            counts = np.asarray(context.calibration, np.float64)
        total = counts.sum(axis=1, keepdims=True)
        # A layer that the calibration never reached counts as uniform.
        popularity = counts / np.maximum(total, 1.0)
        popularity = np.where(total > 0.0, popularity, 1.0 / shape.experts)
        self.popularity: Floats = view_of(popularity.ravel(), np.float64)
        self.ranked: Ints = view_of(ranked(popularity).ravel(), np.int64)

        every = np.arange(MOST_TOKENS + 1)
        cpu_s = np.zeros((shape.layers, len(every)))
        gpu_s = np.zeros((shape.layers, len(every)))
        copy_s = np.zeros(shape.layers)
        if context.costs is not None:
            for layer in range(shape.layers):
                copy_s[layer] = context.costs.copy_s(layer)
                cpu_s[layer] = context.costs.cpu_s(layer, every)
                gpu_s[layer] = context.costs.gpu_s(layer, every)
        self.cpu_table: Floats = view_of(cpu_s, np.float64)
        self.gpu_table: Floats = view_of(gpu_s, np.float64)
        self.copy_table: Floats = view_of(copy_s, np.float64)

        self.cpu_s: Floats = zeros(shape.experts)
        self.gpu_s: Floats = zeros(shape.experts)
        self.copy_s: Floats = zeros(shape.experts)
        self.on_gpu: Ints = zeros((2, shape.layers * shape.experts), np.uint8)
        self.made: Ints = zeros((2, shape.layers), np.uint8)
        self.tokens: Ints = view_of([tokens or 0] * 2, np.int64)

    def plan(self, phase: int, layer: int, rows: int, view: MachineView) -> int:
        """Plan a layer when it is first asked for; the row of `on_gpu` with its plan.

        Args:
            phase, layer, rows: of the layer step.
            view: the machine.
        """
        row = 0 if phase == PREFILL else 1
        if not self.made[row, layer]:
            self.made[row, layer] = 1
            # One T for all layers of a phase, though they are planned one by one.
            if not self.tokens[row]:
                self.tokens[row] = max(1, rows)
            self._estimate(layer, min(self.tokens[row], MOST_TOKENS))
            self._search(row, layer, view)
        return row

    def _estimate(self, layer: int, tokens: int) -> None:
        """Note what experts of a layer cost in the average step of so many tokens."""
        for expert in range(self.experts):
            popularity = self.popularity[layer * self.experts + expert]
            chosen = min(1.0, self.top_k * popularity)
            active = 1.0 - math.pow(1.0 - chosen, float(tokens))
            workload = tokens * chosen / max(active, SMALLEST)
            mean = max(1, round(workload))
            self.cpu_s[expert] = active * self.cpu_table[layer, mean]
            self.gpu_s[expert] = active * self.gpu_table[layer, mean]
            self.copy_s[expert] = active * self.copy_table[layer]

    def _search(self, row: int, layer: int, view: MachineView) -> None:
        """Choose the experts that are streamed."""
        first = layer * self.experts
        cpu_total_s = gpu_total_s = 0.0
        absent = 0
        for expert in range(self.experts):
            resident = False
            for gpu in range(view.gpus):
                resident = resident or view.states[gpu, first + expert] == RESIDENT
            self.on_gpu[row, first + expert] = resident
            if resident:
                gpu_total_s += self.gpu_s[expert]
            else:
                cpu_total_s += self.cpu_s[expert]
                absent += 1

        # Seconds of the slowest lane when the n most popular absent ones are streamed.
        link_s = 0.0
        least_s = max(cpu_total_s, gpu_total_s / view.gpus)
        streamed = n = 0
        for place in range(self.experts):
            expert = self.ranked[first + place]
            if self.on_gpu[row, first + expert]:
                continue
            n += 1
            link_s += self.copy_s[expert]
            gpu_total_s += self.gpu_s[expert]
            cpu_total_s -= self.cpu_s[expert]
            slowest_s = max(cpu_total_s, max(gpu_total_s, link_s) / view.gpus)
            # Undivided, neither lane may be given a part.
            if slowest_s < least_s and (n == absent or not self.undivided):
                least_s = slowest_s
                streamed = n
        for place in range(self.experts):
            expert = self.ranked[first + place]
            if streamed and not self.on_gpu[row, first + expert]:
                self.on_gpu[row, first + expert] = 1
                streamed -= 1


class MoELightning(SpreadAssignment):
    """Decide, before a layer's first step, which experts are streamed to the GPU for
    the whole run; the CPU computes the rest.

    The plan is a `SplitPlan`: residents stay on the GPU (give it a static cache), and
    of the others as many are streamed as balance CPU, GPU and link. Prefill and decode
    have plans of their own. An expert that became resident since is computed where it
    is. The prefetch policy of the same name streams ahead.

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
        SpreadAssignment.start(self, context)
        self.split = SplitPlan(context, self.tokens, undivided=self.undivided)

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        split = self.split
        row = split.plan(work.phase, work.layer, work.rows, view)
        self.allow_residents(work)
        for i in range(work.active):
            if split.on_gpu[row, work.first + work.experts[i]]:
                self.allow(work, i)
        self.spread(work, lanes)
        return 0

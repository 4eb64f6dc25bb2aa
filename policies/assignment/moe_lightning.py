"""MoE-Lightning's offline search: one split per layer, for average workloads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.assignment._kernels import ascending, launch, some_gpu, spread
from moesim.policies.base import RESIDENT
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import ASSIGN, AssignmentKernels, State, Work
from moesim.policies.parameters import expect
from moesim.policies.ranking import ranked
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import RunContext


# Keeps the division by an activation probability of zero harmless.
_SMALLEST = 1e-12


MOST_TOKENS = 1 << 13
"""Tokens of the largest step that is planned for; larger ones have its plan."""

_PREFILL = int(Phase.PREFILL)

# Rows of the state's marks, by key: plans of prefill and of decode; whether there is
# such a plan, at each layer's first key; and experts by layer, most popular first.
_MADE = 2
_RANKED = 4

# Rows of the state's scores: popularity by key; seconds by tokens on CPU and GPU, of
# each layer; and of one copy, by layer.
_POPULARITY = 0
_COPY_S = 1
_TABLES = 2

# Places in the state's integers.
_EXPERTS = 0
_LAYERS = 1
_TOP_K = 2
_STATED = 3
_UNDIVIDED = 4
_TOKENS = 5


def split_state(
    context: RunContext, tokens: int | None, *, undivided: bool = False
) -> State:
    """What a plan of all layers and phases begins with.

    Experts that are resident when a layer is planned stay on the GPU. Of the others the
    most popular are streamed, as many as minimise ``max(T_cpu, T_gpu, T_link)`` for the
    average step, ties to fewer. In an average step of T tokens an expert of popularity
    p, the share of all choices that fall on it, is active with probability ``a = 1 - (1
    - K p) ** T`` and then has ``T K p / a`` tokens; its costs count a times. Popularity
    comes from the calibration trace; without one all experts are equally popular.

    Args:
        context: sizes, costs and calibration.
        tokens: T; None takes the tokens that a phase is first asked for with.
        undivided: stream all absent experts of a layer or none.
    """
    shape = context.shape
    counts = np.ones((shape.layers, shape.experts))
    if context.calibration is not None:
        counts = np.asarray(context.calibration, np.float64)
    total = counts.sum(axis=1, keepdims=True)
    # A layer that the calibration never reached counts as uniform.
    popularity = counts / np.maximum(total, 1.0)
    popularity = np.where(total > 0.0, popularity, 1.0 / shape.experts)

    keys = shape.layers * shape.experts
    scores = np.zeros((_TABLES + 2 * shape.layers, max(keys, MOST_TOKENS + 1)))
    scores[_POPULARITY, :keys] = popularity.ravel()
    if context.costs is not None:
        every = np.arange(MOST_TOKENS + 1)
        for layer in range(shape.layers):
            scores[_COPY_S, layer] = context.costs.copy_s(layer)
            row = _TABLES + 2 * layer
            scores[row, : len(every)] = context.costs.cpu_s(layer, every)
            scores[row + 1, : len(every)] = context.costs.gpu_s(layer, every)
    marks = np.zeros((_RANKED + 1, keys), np.int64)
    marks[_RANKED] = ranked(popularity).ravel()
    rules = (shape.top_k, tokens or 0, undivided, 0, 0)
    return State(
        scores,
        marks,
        np.empty(0),
        np.array([shape.experts, shape.layers, *rules], np.int64),
    )


@compiled
def planned(
    state: State, phase: int, layer: int, rows: int, states: np.ndarray
) -> np.ndarray:
    """Which experts belong on a GPU in a layer step of so many tokens: marks by key, of
    one phase; they are made when a layer is first asked for.

    Args:
        state: of `split_state`.
        phase, layer, rows: of the layer step.
        states: int8 [G, L * E].
    """
    row = 0 if phase == _PREFILL else 1
    first = layer * state.integers[_EXPERTS]
    if not state.marks[_MADE + row, first]:
        state.marks[_MADE + row, first] = 1
        # One T for all layers of a phase, though they are planned one by one.
        if not state.integers[_TOKENS + row]:
            state.integers[_TOKENS + row] = max(1, rows)
        tokens = state.integers[_STATED]
        if not tokens:
            tokens = state.integers[_TOKENS + row]
        _search(state, layer, min(tokens, MOST_TOKENS), states, state.marks[row])
    return state.marks[row]


@compiled
def _search(
    state: State, layer: int, tokens: int, states: np.ndarray, plan: np.ndarray
) -> None:
    """Plan a layer for steps of so many tokens."""
    experts = state.integers[_EXPERTS]
    first = layer * experts
    gpus = len(states)
    cpu_s = np.empty(experts)
    gpu_s = np.empty(experts)
    copy_s = np.empty(experts)
    cpu_total_s = 0.0
    gpu_total_s = 0.0
    absent = 0
    for expert in range(experts):
        popularity = state.scores[_POPULARITY, first + expert]
        chosen = min(1.0, state.integers[_TOP_K] * popularity)
        active = 1.0 - math.pow(1.0 - chosen, float(tokens))
        workload = tokens * chosen / max(active, _SMALLEST)
        mean = max(1, int(np.rint(workload)))
        cpu_s[expert] = active * state.scores[_TABLES + 2 * layer, mean]
        gpu_s[expert] = active * state.scores[_TABLES + 2 * layer + 1, mean]
        copy_s[expert] = active * state.scores[_COPY_S, layer]
        resident = False
        for gpu in range(gpus):
            resident |= states[gpu, first + expert] == RESIDENT
        plan[first + expert] = resident
        if resident:
            gpu_total_s += gpu_s[expert]
        else:
            cpu_total_s += cpu_s[expert]
            absent += 1

    # Seconds of the slowest lane when the n most popular absent ones are streamed.
    link_s = 0.0
    least_s = max(cpu_total_s, gpu_total_s / gpus)
    streamed = 0
    n = 0
    for expert in state.marks[_RANKED, first : first + experts]:
        if plan[first + expert]:
            continue
        n += 1
        link_s += copy_s[expert]
        gpu_total_s += gpu_s[expert]
        cpu_total_s -= cpu_s[expert]
        slowest_s = max(cpu_total_s, max(gpu_total_s, link_s) / gpus)
        # Undivided, neither lane may be given a part.
        if slowest_s < least_s and (n == absent or not state.integers[_UNDIVIDED]):
            least_s = slowest_s
            streamed = n
    for expert in state.marks[_RANKED, first : first + experts]:
        if streamed and not plan[first + expert]:
            plan[first + expert] = 1
            streamed -= 1


@compiled(ASSIGN)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> int:
    """Follow the plan of this layer and phase, in ascending expert id."""
    plan = planned(state, work.phase, work.layer, work.rows, work.states)
    first = work.layer * state.integers[_EXPERTS]
    allowed = work.arrive_s == 0.0
    for gpu in range(len(allowed)):
        for i in range(len(lanes)):
            allowed[gpu, i] |= plan[first + work.experts[i]] != 0
    placed = spread(some_gpu(allowed), allowed, work.gpu_s, work.arrive_s, work.link_s)
    launch(lanes, order, placed, ascending(len(lanes)))
    return 0


class MoELightning(CompiledAssignment):
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

    reads_states = True

    def __init__(self, *, tokens: int | None = None, undivided: bool = False) -> None:
        expect(tokens is None or tokens >= 1, "tokens", "a number >= 1 or none", tokens)
        self.tokens = tokens
        self.undivided = undivided

    def start(self, context: RunContext) -> None:
        """Begin without plans."""
        super().start(context)
        known = split_state(context, self.tokens, undivided=self.undivided)
        self.brought = AssignmentKernels(_assign, known)

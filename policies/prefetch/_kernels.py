"""Compiled choice of absent experts from a ranking of a coming layer's experts.

E experts of a layer, G GPUs.
"""

from __future__ import annotations

import numpy as np

from moesim.policies.base import ABSENT
from moesim.policies.compilation import called
from moesim.policies.kernels import PREFETCH, KernelView, State, Work
from moesim.traces.compilation import compiled
from moesim.traces.format.schema import Phase

_DECODE = int(Phase.DECODE)


@called
def is_present(states: np.ndarray, key: int) -> bool:
    """Whether an expert is on any GPU or on its way to one."""
    for gpu in range(len(states)):
        if states[gpu, key] != ABSENT:
            return True
    return False


@called
def ranked_experts(value: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Ids of the experts of a positive `value` [E], highest first.

    Ties go to the higher `second` [E], or to the lower id.
    """
    ranked = np.empty(len(value), np.int64)
    count = 0
    for expert in range(len(value)):
        if value[expert] <= 0:
            continue
        rank = count
        while rank > 0:
            other = ranked[rank - 1]
            if value[other] > value[expert]:
                break
            if value[other] == value[expert] and second[other] >= second[expert]:
                break
            ranked[rank] = other
            rank -= 1
        ranked[rank] = expert
        count += 1
    return ranked[:count]


@called
def name_absent(
    ranked: np.ndarray,
    layer: int,
    experts: int,
    states: np.ndarray,
    size: int,
    refill: bool,
    named: np.ndarray,
    count: int,
) -> int:
    """Name ranked experts that are neither on a GPU nor on their way to one.

    Args:
        ranked: ids of experts of `layer`, most wanted first.
        layer: a coming layer.
        experts: E.
        states: int8 [G, L * E].
        size: ranked experts considered.
        refill: present experts leave their rank to the next expert; otherwise they use
            it up.
        named: flat keys; is filled from `count` on.
        count: keys that are named already.

    Returns:
        How many are named now.
    """
    considered = 0
    for expert in ranked:
        if considered == size:
            break
        key = layer * experts + expert
        absent = not is_present(states, key)
        if absent:
            named[count] = key
            count += 1
        if absent or not refill:
            considered += 1
    return count


@compiled(PREFETCH)
def by_predicted_workload(
    state: State, work: Work, view: KernelView, named: np.ndarray
) -> int:
    """Rank each coming layer that is predicted by its workload; nearer ones come first.

    The state's integers: ranked experts considered in each layer; whether present ones
    leave their rank to the next; whether ties between equal workloads go to the higher
    sum of scores; most keys of all; and whether nothing is named in a prefill.
    """
    if state.integers[4] and work.phase != _DECODE:
        return 0
    size = state.integers[0]
    refill = state.integers[1] != 0
    by_score = state.integers[2] != 0
    count = 0
    depths, experts = view.workload.shape
    layers = view.states.shape[1] // experts
    for depth in range(depths):
        layer = work.layer + 1 + depth
        if layer >= layers:
            break
        second = view.score_sums[depth]
        if not by_score:
            second = np.zeros(experts, np.float32)
        ranked = ranked_experts(view.workload[depth], second)
        count = name_absent(
            ranked, layer, experts, view.states, size, refill, named, count
        )
    return min(count, state.integers[3])

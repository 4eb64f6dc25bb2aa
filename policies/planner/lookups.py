"""Loops over the planner's arrays.

A active experts, L layers, E experts of a layer.
"""

from __future__ import annotations

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.names import ABSENT, RESIDENT


def look_up(
    state: np.ndarray,
    landing_s: np.ndarray,
    layer: int,
    experts: np.ndarray,
    now_s: float,
    absent_s: float,
    states: np.ndarray,
    wait_s: np.ndarray,
) -> None:
    """Fill in states and waiting times of a layer's active experts.

    Args:
        state: int8 [L, E].
        landing_s: float64 [L, E].
        layer: MoE layer.
        experts: int32 [A].
        now_s: the time.
        absent_s: seconds until an absent expert would be present.
        states: int8 [A], result.
        wait_s: float64 [A], result: seconds until each is present.
    """
    for i in range(len(experts)):
        expert = experts[i]
        states[i] = state[layer, expert]
        if states[i] == RESIDENT:
            wait_s[i] = 0.0
        elif states[i] == ABSENT:
            wait_s[i] = absent_s
        else:
            wait_s[i] = max(0.0, landing_s[layer, expert] - now_s)


def by_tokens(
    cpu_table_s: np.ndarray,
    gpu_table_s: np.ndarray,
    tokens: np.ndarray,
    cpu_s: np.ndarray,
    gpu_s: np.ndarray,
) -> bool:
    """Look the seconds of experts up by their tokens, on both kinds of lanes.

    Args:
        cpu_table_s: float64 [T], by tokens.
        gpu_table_s: likewise.
        tokens: int32 [A].
        cpu_s: float64 [A], result.
        gpu_s: float64 [A], result.

    Returns:
        Whether the tables were long enough.
    """
    length = min(len(cpu_table_s), len(gpu_table_s))
    for i in range(len(tokens)):
        count = tokens[i]
        if count >= length:
            return False
        cpu_s[i] = cpu_table_s[count]
        gpu_s[i] = gpu_table_s[count]
    return True


def count_holds(
    holds: np.ndarray, layer: int, experts: np.ndarray, change: int
) -> None:
    """Add `change` to the hold counters of some experts of a layer."""
    for i in range(len(experts)):
        holds[layer, experts[i]] += change


def is_legal(lanes: np.ndarray, order: np.ndarray, active: int, gpus: int) -> bool:
    """Whether an assignment names a lane in 0..gpus for each of `active` experts, and a
    permutation as order.
    """
    if len(lanes) != active or len(order) != active:
        return False
    seen = zeros(active, np.uint8)
    for i in range(active):
        position = order[i]
        if lanes[i] < 0 or lanes[i] > gpus:
            return False
        if position < 0 or position >= active or seen[position]:
            return False
        seen[position] = 1
    return True


def missing(
    lanes: np.ndarray,
    order: np.ndarray,
    lane: int,
    state: np.ndarray,
    layer: int,
    experts: np.ndarray,
    keys: np.ndarray,
) -> int:
    """Find what is assigned to `lane` and absent from a memory: flat keys, in launch
    order.

    Fills in `keys` int64 [A], and returns how many there are.
    """
    first_key = layer * state.shape[1]
    count = 0
    for n in range(len(order)):
        i = order[n]
        if lanes[i] == lane and state[layer, experts[i]] == ABSENT:
            keys[count] = first_key + experts[i]
            count += 1
    return count


def distinct_members(chosen: np.ndarray, among: np.ndarray) -> bool:
    """Whether every chosen key is in the ascending `among`, none of them twice."""
    for i in range(len(chosen)):
        if not _contains(among, chosen[i]):
            return False
        for j in range(i):
            if chosen[j] == chosen[i]:
                return False
    return True


def _contains(among: np.ndarray, key: int) -> bool:
    for n in range(len(among)):
        if among[n] == key:
            return True
    return False


def unheld(
    state: np.ndarray, holds: np.ndarray, first: int, end: int, keys: np.ndarray
) -> int:
    """Find the unheld residents of layers first..end-1: flat keys, ascending.

    Fills in `keys` int64, one for each expert of these layers at most, and returns how
    many there are.
    """
    experts = state.shape[1]
    count = 0
    for layer in range(first, end):
        for expert in range(experts):
            if state[layer, expert] == RESIDENT and holds[layer, expert] == 0:
                keys[count] = layer * experts + expert
                count += 1
    return count

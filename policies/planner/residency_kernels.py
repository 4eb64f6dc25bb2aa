"""Compiled glances at a memory's books: the planner's inner loops over the active
experts.
"""

from __future__ import annotations

import numba
import numpy as np
from moesim.policies.base import ABSENT, IN_FLIGHT, RESIDENT


@numba.njit(cache=True)
def look(
    state: np.ndarray,
    landing_s: np.ndarray,
    layer: int,
    experts: np.ndarray,
    now_s: float,
    absent_s: float,
    found: np.ndarray,
    wait_s: np.ndarray,
) -> None:
    """Fill in the state, `found` int8 [A], of a layer's active experts and seconds
    until each is present, float64 [A].

    The caller brings the arrays: to return new ones takes longer than the loop.
    """
    for i in range(len(experts)):
        expert = experts[i]
        found[i] = state[layer, expert]
        if found[i] == RESIDENT:
            wait_s[i] = 0.0
        elif found[i] == ABSENT:
            wait_s[i] = absent_s
        else:
            wait_s[i] = max(0.0, landing_s[layer, expert] - now_s)


@numba.njit(cache=True)
def count_holds(
    holds: np.ndarray, layer: int, experts: np.ndarray, change: int
) -> None:
    """Add `change` to the hold counters of some experts of a layer."""
    for expert in experts:
        holds[layer, expert] += change


@numba.njit(cache=True)
def legal(lanes: np.ndarray, order: np.ndarray, active: int, gpus: int) -> bool:
    """Whether an assignment names one lane in 0..gpus for each active expert, and a
    permutation as order.
    """
    if len(lanes) != active or len(order) != active:
        return False
    seen = np.zeros(active, np.bool_)
    for i in range(active):
        place = order[i]
        if (
            lanes[i] < 0
            or lanes[i] > gpus
            or place < 0
            or place >= active
            or seen[place]
        ):
            return False
        seen[place] = True
    return True


@numba.njit(cache=True)
def missing(
    lanes: np.ndarray,
    order: np.ndarray,
    lane: int,
    state: np.ndarray,
    layer: int,
    experts: np.ndarray,
) -> np.ndarray:
    """Flat keys, in launch order, of experts assigned to `lane` that are absent from a
    memory.
    """
    first = layer * state.shape[1]
    found = np.empty(len(order), np.int64)
    count = 0
    for i in order:
        if lanes[i] == lane and state[layer, experts[i]] == ABSENT:
            found[count] = first + experts[i]
            count += 1
    return found[:count]


@numba.njit(cache=True)
def distinct_members(chosen: np.ndarray, among: np.ndarray) -> bool:
    """Whether every chosen key is in the ascending `among`, none of them twice."""
    for i in range(len(chosen)):
        place = np.searchsorted(among, chosen[i])
        if place == len(among) or among[place] != chosen[i]:
            return False
        for j in range(i):
            if chosen[j] == chosen[i]:
                return False
    return True


@numba.njit(cache=True)
def unheld(state: np.ndarray, holds: np.ndarray, first: int, end: int) -> np.ndarray:
    """Ascending flat keys of residents in layers first..end-1 that nobody holds."""
    experts = state.shape[1]
    found = np.empty((end - first) * experts, np.int64)
    count = 0
    for layer in range(first, end):
        for expert in range(experts):
            if state[layer, expert] == RESIDENT and holds[layer, expert] == 0:
                found[count] = layer * experts + expert
                count += 1
    return found[:count]


@numba.njit(cache=True)
def depart(
    state: np.ndarray, landing_s: np.ndarray, keys: np.ndarray, expected_s: np.ndarray
) -> None:
    """Put copies of `keys` in flight, with their expected landing times."""
    experts = state.shape[1]
    for i in range(len(keys)):
        layer, expert = divmod(keys[i], experts)
        state[layer, expert] = IN_FLIGHT
        landing_s[layer, expert] = expected_s[i]


@numba.njit(cache=True)
def leave(state: np.ndarray, holds: np.ndarray, keys: np.ndarray) -> bool:
    """Make `keys` absent; False if one was absent already or is held."""
    experts = state.shape[1]
    for key in keys:
        layer, expert = divmod(key, experts)
        if state[layer, expert] == ABSENT or holds[layer, expert] != 0:
            return False
        state[layer, expert] = ABSENT
    return True

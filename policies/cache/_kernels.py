"""Compiled decisions of caches that rank experts by a number.

Scores are arrays by flat key, ``layer * experts + expert``.

A active experts, C candidates, M incoming.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.policies.kernels import (
    ACCESSED,
    EXPERT_IDS,
    KEYS,
    MOVED,
    SECONDS,
    VICTIMS,
    State,
    Work,
    state,
)

if TYPE_CHECKING:
    from moesim.policies.base import RunContext


_SCORES = SECONDS
_MUTABLE_SCORES = nb.float64[::1]


def score_state(context: RunContext, rows: int = 1, **more: Any) -> State:
    """A state of so many rows of scores by flat key, all 0, and what else it has."""
    keys = context.shape.layers * context.shape.experts
    return state(np.zeros((rows, keys)), **more)


@compiled(
    nb.void(
        KEYS,
        _SCORES,
        _SCORES,
        nb.int64[::1],
    )
)
def lowest_scores(
    candidates: np.ndarray,
    score: np.ndarray,
    tie: np.ndarray,
    best: np.ndarray,
) -> None:
    """Find the candidates with the lowest score, then lowest `tie`, then lowest key, in
    that order.

    `candidates` int64 [C] ascending keys into `score` and `tie`. Fills in `best` int64
    [M], -1 where C < M.
    """
    count = len(best)
    best[:] = -1
    kept = 0
    for key in candidates:
        # Insertion into a short sorted list: few experts leave at a time. Candidates
        # ascend, so stopping at an equal one leaves the lower key in front.
        rank = kept
        while rank > 0:
            other = best[rank - 1]
            if score[key] > score[other] or (
                score[key] == score[other] and tie[key] >= tie[other]
            ):
                break
            rank -= 1
        if rank == count:
            continue

        kept = min(kept + 1, count)
        for j in range(kept - 1, rank, -1):
            best[j] = best[j - 1]
        best[rank] = key


@compiled(VICTIMS)
def lowest_victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    """Choose by `lowest_scores`: the first row of scores, then the last one."""
    lowest_scores(candidates, state.scores[0], state.scores[-1], chosen)


@compiled(
    nb.void(
        _MUTABLE_SCORES,
        nb.int64[::1],
        EXPERT_IDS,
        nb.int64,
        nb.int64,
        nb.float64,
    ),
)
def count_accesses(
    score: np.ndarray,
    counted: np.ndarray,
    experts: np.ndarray,
    first: int,
    width: int,
    decay: float,
) -> None:
    """Age the `width` scores from key `first` by `decay`, then add 1 to each of
    `experts` that is counted.

    `score` float64 [keys] and `counted` int64 [keys], 0 or 1, by flat key; `experts`
    int32 [A] relative to `first`.
    """
    if decay < 1.0:
        for key in range(first, first + width):
            score[key] *= decay
    for expert in experts:
        key = first + expert
        if counted[key]:
            score[key] += 1.0


@compiled(
    nb.void(
        _MUTABLE_SCORES,
        EXPERT_IDS,
        nb.int64,
        nb.float64,
    )
)
def stamp(
    score: np.ndarray,
    experts: np.ndarray,
    first: int,
    now: float,
) -> None:
    """Set the score of each of `experts`, int32 [A] relative to key `first`, to
    `now`.
    """
    for expert in experts:
        score[first + expert] = now


@compiled(nb.void(_MUTABLE_SCORES, KEYS, nb.float64))
def stamp_keys(score: np.ndarray, keys: np.ndarray, now: float) -> None:
    """Set the score of each of `keys`, int64 [M], to `now`."""
    for key in keys:
        score[key] = now


@compiled(nb.void(nb.int64[::1], KEYS, nb.int64))
def mark_keys(marks: np.ndarray, keys: np.ndarray, mark: int) -> None:
    """Set the mark of each of `keys`, int64 [M]."""
    for key in keys:
        marks[key] = mark


@compiled(nb.void(_MUTABLE_SCORES, KEYS, nb.float64, nb.float64))
def number_keys(
    score: np.ndarray, keys: np.ndarray, entries: float, direction: float
) -> None:
    """Score `keys`, int64 [M], by how many have entered before, times `direction`."""
    for n in range(len(keys)):
        score[keys[n]] = direction * (entries + n)


@compiled(ACCESSED)
def lru_accessed(state: State, work: Work) -> None:
    """Stamp the active experts with the next layer step's number."""
    state.numbers[0] += 1.0
    first = work.layer * state.integers[0]
    stamp(state.scores[0], work.experts, first, state.numbers[0])


@compiled(MOVED)
def lru_admitted(state: State, keys: np.ndarray) -> None:
    """Stamp what enters."""
    stamp_keys(state.scores[0], keys, state.numbers[0])


@compiled(MOVED)
def fifo_admitted(state: State, keys: np.ndarray) -> None:
    """Number what enters; the second number is the direction."""
    number_keys(state.scores[0], keys, state.numbers[0], state.numbers[1])
    state.numbers[0] += len(keys)


@compiled(nb.int64[::1](KEYS, SECONDS))
def by_descending_score(
    keys: np.ndarray,
    score: np.ndarray,
) -> np.ndarray:
    """Sort a few `keys`, int64 [M], by descending score, equal ones as they stand."""
    order = np.empty(len(keys), np.int64)
    for n in range(len(keys)):
        rank = n
        while rank > 0 and score[keys[n]] > score[order[rank - 1]]:
            order[rank] = order[rank - 1]
            rank -= 1
        order[rank] = keys[n]
    return order


@compiled(
    nb.int64[::1](
        KEYS,
        KEYS,
        SECONDS,
    )
)
def outscored_victims(
    incoming: np.ndarray,
    candidates: np.ndarray,
    score: np.ndarray,
) -> np.ndarray:
    """Keep the C best of `incoming` and `candidates`: a victim for each incoming key,
    -1 to decline it.

    The best incoming key meets the worst candidate, and so on; a key that scores below
    its opponent is declined, an equal one admitted. `incoming` int64 [M], `candidates`
    int64 [C] ascending. Returns int64 [M].
    """
    worst = np.empty(len(incoming), np.int64)
    lowest_scores(candidates, score, score, worst)
    victims = np.full(len(incoming), -1, np.int64)

    # Positions of `incoming`, best first; a few keys, so by insertion.
    order = np.empty(len(incoming), np.int64)
    for n in range(len(incoming)):
        rank = n
        while rank > 0:
            before = incoming[order[rank - 1]]
            if score[incoming[n]] <= score[before]:
                break
            order[rank] = order[rank - 1]
            rank -= 1
        order[rank] = n

    for n in range(len(incoming)):
        key = incoming[order[n]]
        # Both lists are sorted: once a pair loses, all that follow lose too.
        if worst[n] < 0 or score[key] < score[worst[n]]:
            break
        victims[order[n]] = worst[n]
    return victims

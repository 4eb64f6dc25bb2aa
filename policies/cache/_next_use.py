"""Compiled decisions of caches that know when each expert is used next.

Scores are arrays by flat key, ``layer * experts + expert``: the larger, the sooner.

A active experts, C candidates, M incoming.
"""

from __future__ import annotations

import numpy as np
from numba import types as nb

from moesim.policies.cache import _kernels
from moesim.policies.cache._kernels import lowest_scores
from moesim.policies.compilation import EXPERT_IDS, KEYS, SECONDS
from moesim.traces.compilation import compiled, linked

_SCORES = SECONDS
_MUTABLE_SCORES = nb.float64[::1]


@compiled(nb.int64[::1](KEYS, _SCORES))
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


@linked(
    nb.int64[::1](
        KEYS,
        KEYS,
        _SCORES,
    ),
    _kernels,
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


@compiled(
    nb.void(
        _MUTABLE_SCORES,
        EXPERT_IDS,
        KEYS,
        nb.int64,
        nb.int64,
        nb.int64,
    )
)
def score_next_uses(
    score: np.ndarray,
    experts: np.ndarray,
    uses: np.ndarray,
    layer: int,
    layers: int,
    never: int,
) -> None:
    """Score each expert by minus the time, ``step * layers + layer``, of its next use;
    never is minus infinity.

    `score` float64 [E] of one layer; `experts` int32 [A] of it; `uses` int64 [A] their
    next steps, `never` or later for none.
    """
    for i in range(len(experts)):
        if uses[i] >= never:
            score[experts[i]] = -np.inf
        else:
            score[experts[i]] = -float(uses[i] * layers + layer)

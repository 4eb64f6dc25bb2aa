"""Compiled decisions of caches that rank experts by a number, and a whole cache replay.

Scores are arrays by flat key, ``layer * experts + expert``. `replay_accesses` is the
loop over many layer steps that calls the other kernels, so it stands in their file
(see `moesim.policies.compilation`).

A active experts, C candidates, M incoming.
"""

from __future__ import annotations

import numpy as np
from numba import types as nb

from moesim.policies.compilation import EXPERT_IDS, KEYS, SECONDS
from moesim.policies.kernels import ACCESSED, MOVED, VICTIMS, State, Work
from moesim.traces.compilation import compiled

_SCORES = SECONDS
_MUTABLE_SCORES = nb.float64[::1]

# Rules of `replay_accesses`. Plain numbers, as a kernel takes no enumeration.
REPLAY_LRU = 0
"""Evicts the least recently used."""

REPLAY_BELADY = 1
"""Evicts the farthest next use; declines what would come back even later."""

REPLAY_BELADY_ADMITTING = 2
"""Evicts the farthest next use; every miss enters as long as a candidate is left."""


@compiled(
    nb.int64[::1](
        KEYS,
        _SCORES,
        _SCORES,
        nb.int64,
    )
)
def lowest_scores(
    candidates: np.ndarray,
    score: np.ndarray,
    tie: np.ndarray,
    count: int,
) -> np.ndarray:
    """Find the `count` candidates with the lowest score, then lowest `tie`, then lowest
    key, in that order.

    `candidates` int64 [C] ascending keys into `score` and `tie`. Returns int64 [count],
    -1 where C < count.
    """
    best = np.full(count, -1, np.int64)
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
    return best


@compiled(VICTIMS)
def lowest_victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    """Choose by `lowest_scores`: the first row of scores, then the last one."""
    best = lowest_scores(candidates, state.scores[0], state.scores[-1], len(incoming))
    for n in range(len(incoming)):
        chosen[n] = best[n]


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


@compiled(
    nb.int64[::1](
        KEYS,
        KEYS,
        _SCORES,
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
    worst = lowest_scores(candidates, score, score, len(incoming))
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


@compiled(ACCESSED)
def lfu_accessed(state: State, work: Work) -> None:
    """Count the active experts that are counted, after ageing their layer.

    Scores: counts, and where ties are not by id, the tie's numbers. Marks: what is
    counted. Numbers: layer steps, decay. Integers: E, whether entering starts a count,
    whether ties go to the least recently used.
    """
    width = state.integers[0]
    first = work.layer * width
    decay = state.numbers[1]
    count_accesses(state.scores[0], state.marks[0], work.experts, first, width, decay)
    state.numbers[0] += 1.0
    if state.integers[2]:
        stamp(state.scores[1], work.experts, first, state.numbers[0])


@compiled(MOVED)
def lfu_admitted(state: State, keys: np.ndarray) -> None:
    """Begin to count what enters."""
    if state.integers[1]:
        stamp_keys(state.scores[0], keys, 1.0)
        mark_keys(state.marks[0], keys, 1)
    if len(state.scores) > 1:
        stamp_keys(state.scores[1], keys, state.numbers[0])


@compiled(MOVED)
def lfu_evicted(state: State, keys: np.ndarray) -> None:
    """Forget what leaves, unless all-time counts are kept."""
    if state.integers[1]:
        mark_keys(state.marks[0], keys, 0)


@compiled(MOVED)
def fifo_admitted(state: State, keys: np.ndarray) -> None:
    """Number what enters; the second number is the direction."""
    number_keys(state.scores[0], keys, state.numbers[0], state.numbers[1])
    state.numbers[0] += len(keys)


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


@compiled(
    nb.void(
        nb.int64,
        nb.int64,
        nb.int64[::1],
        nb.int64[::1],
        nb.int32[::1],
        nb.float64[::1],
        nb.int64[::1],
        nb.boolean[::1],
        nb.float64[::1],
        nb.int64[::1],
        nb.float64[::1],
        nb.int64[::1],
        nb.int64[::1],
    )
)
def replay_accesses(  # noqa: C901, PLR0912 - one loop, compiled
    rule: int,
    width: int,
    layer_of: np.ndarray,
    edges: np.ndarray,
    experts: np.ndarray,
    next_use: np.ndarray,
    slots: np.ndarray,
    resident: np.ndarray,
    score: np.ndarray,
    used: np.ndarray,
    now: np.ndarray,
    hits: np.ndarray,
    accesses: np.ndarray,
) -> None:
    """Run a block of layer steps through an LRU or Belady cache; update its state.

    Args:
        rule: `REPLAY_LRU`, `REPLAY_BELADY` or `REPLAY_BELADY_ADMITTING`.
        width: experts per layer.
        layer_of: int64 [layer steps].
        edges: int64 [layer steps + 1]; step i uses ``experts[edges[i]:edges[i + 1]]``.
        experts: int32 [accesses], ascending within a layer step.
        next_use: float64 [accesses], Belady's scores; empty for LRU.
        slots: int64 [L] capacity of each layer, or [1] for the global scope.
        resident: bool [keys].
        score: float64 [keys].
        used: int64, as `slots`: slots in use.
        now: float64 [1], layer steps so far.
        hits, accesses: int64 [L], counts so far.
    """
    is_global = len(slots) == 1 and len(hits) > 1
    active = np.zeros(len(resident), np.bool_)

    for i in range(len(layer_of)):
        layer = layer_of[i]
        pool = 0 if is_global else layer
        now[0] += 1.0

        begin = edges[i]
        end = edges[i + 1]
        missing = np.empty(end - begin, np.int64)
        misses = 0
        for j in range(begin, end):
            key = layer * width + experts[j]
            active[key] = True
            score[key] = now[0] if rule == REPLAY_LRU else next_use[j]
            if resident[key]:
                hits[layer] += 1
            else:
                missing[misses] = key
                misses += 1
        accesses[layer] += end - begin

        free = min(misses, slots[pool] - used[pool])
        used[pool] += free
        # Where slots run short, Belady gives them to what is needed soonest.
        if rule != REPLAY_LRU and misses > free:
            missing = by_descending_score(missing[:misses], score)

        evicting = missing[free:misses]
        if len(evicting):
            first_key = 0 if is_global else layer * width
            end_key = len(resident) if is_global else (layer + 1) * width
            candidates = np.empty(end_key - first_key, np.int64)
            count = 0
            for key in range(first_key, end_key):
                # Active experts are held: none of them leaves in its own layer step.
                if resident[key] and not active[key]:
                    candidates[count] = key
                    count += 1

            evicting = evicting[:count]
            candidates = candidates[:count]
            if rule == REPLAY_BELADY:
                victims = outscored_victims(evicting, candidates, score)
            else:
                victims = lowest_scores(candidates, score, score, len(evicting))
            for n in range(len(evicting)):
                if victims[n] >= 0:
                    resident[victims[n]] = False
                    resident[evicting[n]] = True

        # Entered last: what took a free slot is active, and was no candidate anyway.
        for n in range(free):
            resident[missing[n]] = True
        for j in range(begin, end):
            active[layer * width + experts[j]] = False

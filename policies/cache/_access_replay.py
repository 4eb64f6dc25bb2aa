"""A whole cache replay as one compiled loop: LRU, and Belady in two forms."""

from __future__ import annotations

import numpy as np
from numba import types as nb

from moesim.policies.cache import _kernels, _next_use
from moesim.policies.cache._kernels import lowest_scores
from moesim.policies.cache._next_use import by_descending_score, outscored_victims
from moesim.traces.compilation import linked

# Rules of `replay_accesses`. Plain numbers, as a kernel takes no enumeration.
REPLAY_LRU = 0
"""Evicts the least recently used."""

REPLAY_BELADY = 1
"""Evicts the farthest next use; declines what would come back even later."""

REPLAY_BELADY_ADMITTING = 2
"""Evicts the farthest next use; every miss enters as long as a candidate is left."""


@linked(
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
    ),
    _kernels,
    _next_use,
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
                victims = np.empty(len(evicting), np.int64)
                lowest_scores(candidates, score, score, victims)
            for n in range(len(evicting)):
                if victims[n] >= 0:
                    resident[victims[n]] = False
                    resident[evicting[n]] = True

        # Entered last: what took a free slot is active, and was no candidate anyway.
        for n in range(free):
            resident[missing[n]] = True
        for j in range(begin, end):
            active[layer * width + experts[j]] = False

"""Compiled counting of predicted workloads, for prefetching by gate scores.

T tokens, E experts of a layer.
"""

from __future__ import annotations

import numpy as np
from numba import types as nb

from moesim.traces.compilation import compiled, input_array


@compiled(nb.int64[::1](input_array(nb.float32, 2), nb.int64))
def predicted_workload(
    scores: np.ndarray,
    top_k: int,
) -> np.ndarray:
    """Count how often each expert is among a token's `top_k` best scores, ties to the
    lower id.

    `scores` float32 [T, E]. Returns int64 [E].
    """
    tokens, experts = scores.shape
    top_k = min(top_k, experts)
    workload = np.zeros(experts, np.int64)
    best = np.empty(top_k, np.int64)

    for t in range(tokens):
        # The best ids so far, in order.
        kept = 0
        for expert in range(experts):
            # Experts come in ascending id, so an equal score ranks behind.
            rank = kept
            while rank > 0 and scores[t, expert] > scores[t, best[rank - 1]]:
                rank -= 1
            if rank == top_k:
                continue

            kept = min(kept + 1, top_k)
            for j in range(kept - 1, rank, -1):
                best[j] = best[j - 1]
            best[rank] = expert
        for n in range(kept):
            workload[best[n]] += 1
    return workload

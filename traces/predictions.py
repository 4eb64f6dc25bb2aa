"""Workloads that a recorded prediction of a coming layer's gate amounts to.

T tokens, E experts of a layer.
"""

from __future__ import annotations

import numpy as np


def predicted_workload(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Count how often each expert is among a token's `top_k` best scores, ties to the
    lower id.

    `scores` float32 [T, E]. Returns int32 [E].
    """
    workload = np.zeros((1, 1, scores.shape[1]), np.int32)
    tally_layer_steps(
        scores,
        np.array([0, len(scores)]),
        np.array([True]),
        top_k,
        0,
        workload,
        np.zeros(workload.shape, np.float32),
    )
    return workload[0, 0]


def tally_layer_steps(
    scores: np.ndarray,
    row_edges: np.ndarray,
    has_target: np.ndarray,
    top_k: int,
    predictor: int,
    workload: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Tally S layer steps, of which each owns ``row_edges[s]:row_edges[s + 1]`` of the
    scores. Those without a target are left as they are.

    Args:
        scores: float32 [R, E].
        row_edges: int64 [S + 1].
        has_target: bool [S].
        top_k: experts of a token.
        predictor: place of this predictor among P.
        workload: int32 [S, P, E], zero; gets how often each expert is among a token's
            best scores, ties to the lower id.
        sums: float32 [S, P, E], likewise; gets its scores, summed over the tokens.
    """
    experts = scores.shape[1]
    most = min(top_k, experts)
    best = np.empty(most, np.int64)
    for s in range(len(has_target)):
        if not has_target[s]:
            continue
        for t in range(row_edges[s], row_edges[s + 1]):
            # The best ids so far, in order.
            kept = 0
            for expert in range(experts):
                score = scores[t, expert]
                sums[s, predictor, expert] += score
                # Experts come in ascending id, so an equal score ranks behind.
                rank = kept
                while rank > 0 and score > scores[t, best[rank - 1]]:
                    rank -= 1
                if rank == most:
                    continue

                kept = min(kept + 1, most)
                for j in range(kept - 1, rank, -1):
                    best[j] = best[j - 1]
                best[rank] = expert
            for n in range(kept):
                workload[s, predictor, best[n]] += 1

"""Workloads that a recorded prediction of a coming layer's gate amounts to.

T tokens, E experts of a layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping


def _tally(
    scores: np.ndarray,
    first: int,
    last: int,
    best: np.ndarray,
    workload: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Add up the rows from `first` to before `last`: to the `workload` how often each
    expert is among a token's best scores, as many as `best` has room for, ties to the
    lower id; to `sums` its scores.
    """
    experts = scores.shape[1]
    top_k = len(best)
    for t in range(first, last):
        # The best ids so far, in order.
        kept = 0
        for expert in range(experts):
            score = scores[t, expert]
            sums[expert] += score
            # Experts come in ascending id, so an equal score ranks behind.
            rank = kept
            while rank > 0 and score > scores[t, best[rank - 1]]:
                rank -= 1
            if rank == top_k:
                continue

            kept = min(kept + 1, top_k)
            for j in range(kept - 1, rank, -1):
                best[j] = best[j - 1]
            best[rank] = expert
        for n in range(kept):
            workload[best[n]] += 1


def tally(
    scores: np.ndarray, top_k: int, workload: np.ndarray, sums: np.ndarray
) -> None:
    """Fill in the predicted workload, int32 [E], and each expert's scores summed over
    the tokens, float32 [E].
    """
    best = np.empty(min(top_k, scores.shape[1]), np.int64)
    workload[:] = 0
    sums[:] = 0.0
    _tally(scores, 0, len(scores), best, workload, sums)


def predicted_workload(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Count how often each expert is among a token's `top_k` best scores, ties to the
    lower id.

    `scores` float32 [T, E]. Returns int32 [E].
    """
    workload = np.empty(scores.shape[1], np.int32)
    tally(scores, top_k, workload, np.empty(scores.shape[1], np.float32))
    return workload


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
        workload: int32 [S, P, E], zero; this predictor's are filled in.
        sums: float32 [S, P, E], likewise.
    """
    best = np.empty(min(top_k, scores.shape[1]), np.int64)
    for s in range(len(has_target)):
        if has_target[s]:
            _tally(
                scores,
                row_edges[s],
                row_edges[s + 1],
                best,
                workload[s, predictor],
                sums[s, predictor],
            )


def tallies(
    predicted: Mapping[str, np.ndarray],
    columns: tuple[str, ...],
    top_k: int,
    experts: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Tally each of `columns`: int32 and float32 [columns, E].

    A prediction that a layer does not have, as its target lies past the last one, is
    all zeros.
    """
    workload = np.zeros((len(columns), experts), np.int32)
    sums = np.zeros((len(columns), experts), np.float32)
    for row, column in enumerate(columns):
        scores = predicted.get(column)
        if scores is not None:
            # Compiled code has no float16 on a CPU; float32 orders alike.
            scores = np.ascontiguousarray(scores, np.float32)
            tally(scores, top_k, workload[row], sums[row])
    return workload, sums

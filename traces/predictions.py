"""Workloads that a recorded prediction of a coming layer's gate amounts to.

T tokens, E experts of a layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types as nb

from moesim.traces.compilation import compiled, input_array

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCORES = input_array(nb.float32, 2)


@compiled(nb.int64[::1](_SCORES, nb.int64))
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


@compiled(nb.void(_SCORES, nb.int64, nb.int32[::1], nb.float32[::1]))
def tally(
    scores: np.ndarray,
    top_k: int,
    workload: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Fill in the predicted workload, int32 [E], and each expert's scores summed over
    the tokens, float32 [E].
    """
    workload[:] = predicted_workload(scores, top_k)
    sums[:] = 0.0
    for t in range(len(scores)):
        for expert in range(len(sums)):
            sums[expert] += scores[t, expert]


@compiled(
    nb.void(
        _SCORES,
        nb.int64[::1],
        nb.boolean[::1],
        nb.int64,
        nb.int32[:, ::1],
        nb.float32[:, ::1],
    )
)
def tally_layer_steps(
    scores: np.ndarray,
    row_edges: np.ndarray,
    has_target: np.ndarray,
    top_k: int,
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
        workload: int32 [S, E], filled in.
        sums: float32 [S, E], filled in.
    """
    for s in range(len(has_target)):
        if has_target[s]:
            rows = scores[row_edges[s] : row_edges[s + 1]]
            tally(rows, top_k, workload[s], sums[s])


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

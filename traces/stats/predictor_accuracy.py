"""How well did the recorded predictors know which experts would work? By depth, by
layer, by rank of the workload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from moesim.traces.compilation import compiled
from moesim.traces.format.batch import compose
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase
from numba import types as nb

if TYPE_CHECKING:
    from moesim.traces.format.batch import RoutedLayer
    from moesim.traces.format.reader import Trace

RANKS = 16
"""Workload ranks that are told apart."""

_RANKING = nb.Array(nb.int64, 1, "C", readonly=True)


@compiled(nb.int64[::1](nb.Array(nb.float32, 2, "C", readonly=True), nb.int64))
def _wanted(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Votes int64 [E] of T tokens: ``T * K + 1`` per token that has the expert among
    its K best, plus K - rank.
    """
    tokens, experts = scores.shape
    votes = np.zeros(experts, np.int64)
    best = np.empty(top_k + 1, np.int64)
    for t in range(tokens):
        kept = 0
        for expert in range(experts):
            at = kept
            while at > 0 and scores[t, expert] > scores[t, best[at - 1]]:
                best[at] = best[at - 1]
                at -= 1
            if at < top_k:
                best[at] = expert
                kept = min(kept + 1, top_k)
        for rank in range(kept):
            votes[best[rank]] += tokens * top_k + 1 + top_k - rank
    return votes


def prediction(trace: Trace, *, batch: int = 1) -> dict[str, Any] | None:
    """Accuracy of every predictor of a trace in decode; None without predictions.

    A predictor's workload is the number of tokens that have the expert among their K
    best scores. Ties in a workload, predicted or true, go to the better mean rank, then
    to the lower id.

    Returns:
        per predictor: ``by_layer``, per predicted layer the share of active experts
        among as many best predicted (null where nothing predicts it); ``by_rank``, for
        r = 1 …, the share of the r experts of largest workload among the r best
        predicted, over steps with at least r active experts; ``depth`` and
        ``accuracy``, the mean of ``by_layer`` over layer steps.

    Source: DALI's prefetch accuracy, top-k of the predicted against top-k of the true
    workload.
    """
    columns = [name for name in PREDICTION_COLUMNS if name in trace.columns]
    if not columns:
        return None
    layers = trace.shape.layers
    top_k = trace.shape.top_k
    ranks = min(RANKS, trace.shape.experts)
    folds = {name: (np.zeros((2, layers)), np.zeros((2, ranks))) for name in columns}
    for step in compose(trace, batch=batch, columns=columns):
        if step.phase != Phase.DECODE:
            continue
        truth = [_ranked(routed, trace.shape.experts) for routed in step.layers]
        for routed in step.layers:
            for name, scores in routed.predicted.items():
                target = routed.layer + int(name[len("pred")])
                votes = _wanted(np.ascontiguousarray(scores, dtype=np.float32), top_k)
                _score(
                    np.argsort(-votes, kind="stable"),
                    truth[target],
                    target,
                    *folds[name],
                )
    return {
        name: {
            "depth": int(name[len("pred")]),
            "accuracy": float(by_layer[0].sum() / by_layer[1].sum())
            if by_layer[1].any()
            else None,
            "by_layer": _shares(by_layer),
            "by_rank": _shares(by_rank),
        }
        for name, (by_layer, by_rank) in folds.items()
    }


def _ranked(routed: RoutedLayer, experts: int) -> np.ndarray:
    """Active experts, largest workload first."""
    tokens, top_k = routed.routing.shape
    worth = tokens * top_k + 1 + top_k - np.arange(top_k)
    votes = np.bincount(routed.routing.reshape(-1), np.tile(worth, tokens), experts)
    return np.argsort(-votes, kind="stable")[: len(routed.experts)]


@compiled(nb.void(_RANKING, _RANKING, nb.int64, nb.float64[:, ::1], nb.float64[:, ::1]))
def _score(
    guess: np.ndarray,
    truth: np.ndarray,
    layer: int,
    by_layer: np.ndarray,
    by_rank: np.ndarray,
) -> None:
    """Add the overlaps of two rankings to `by_layer` [2, L] and `by_rank` [2, R]: sums
    and numbers.
    """
    place = np.full(len(guess), len(guess), np.int64)
    for rank in range(len(truth)):
        place[truth[rank]] = rank
    common = 0
    for rank in range(len(truth)):
        common += place[guess[rank]] <= rank  # guessed now, true by now
        for earlier in range(rank):
            common += place[guess[earlier]] == rank  # guessed before, true now
        if rank < by_rank.shape[1]:
            by_rank[0, rank] += common / (rank + 1)
            by_rank[1, rank] += 1
    by_layer[0, layer] += common / len(truth)
    by_layer[1, layer] += 1


def _shares(table: np.ndarray) -> list[float | None]:
    return [float(total / count) if count else None for total, count in table.T]

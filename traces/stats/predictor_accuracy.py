"""How well did the recorded predictors know which experts would work? By depth, by
layer, by rank of the workload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.machine_code.types import input_array
from moesim.traces.format.arrays import top_k
from moesim.traces.format.batch import compose
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase

if TYPE_CHECKING:
    from moesim.traces.format.batch import RoutedLayer
    from moesim.traces.format.reader import Trace

# Workload ranks that are told apart.
RANKS = 16

_RANKING = input_array(nb.int64)


class _Overlaps(NamedTuple):
    """Sums of overlaps and how many they are: float64 [2, L] and [2, R]."""

    by_layer: np.ndarray
    by_rank: np.ndarray


def predictor_depth(name: str) -> int:
    """Return how many layers ahead a predictor looks: 2 of ``pred2_raw``."""
    return int(name[len("pred")])


def prediction(trace: Trace, *, batch: int = 1) -> dict[str, Any] | None:
    """Return the accuracy of every predictor of a trace in decode; None without
    predictions.

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
    names = [name for name in PREDICTION_COLUMNS if name in trace.columns]
    if not names:
        return None

    layers = trace.shape.layers
    experts = trace.shape.experts
    ranks = min(RANKS, experts)
    overlaps = {
        name: _Overlaps(np.zeros((2, layers)), np.zeros((2, ranks))) for name in names
    }

    for step in compose(trace, batch=batch, columns=names):
        if step.phase != Phase.DECODE:
            continue

        # A prediction made at one layer is about a later one.
        truth = [_by_workload(routed, experts) for routed in step.layers]
        for routed in step.layers:
            for name, scores in routed.predicted.items():
                target = routed.layer + predictor_depth(name)
                best = top_k(
                    np.ascontiguousarray(scores, dtype=np.float32), trace.shape.top_k
                )
                predicted = _votes(best, experts)
                _add_overlaps(
                    np.argsort(-predicted, kind="stable"),
                    truth[target],
                    target,
                    *overlaps[name],
                )

    return {name: _figures(name, sums) for name, sums in overlaps.items()}


def _figures(name: str, sums: _Overlaps) -> dict[str, Any]:
    total = sums.by_layer[0].sum()
    count = sums.by_layer[1].sum()
    return {
        "depth": predictor_depth(name),
        "accuracy": float(total / count) if count else None,
        "by_layer": _shares(sums.by_layer),
        "by_rank": _shares(sums.by_rank),
    }


def _shares(table: np.ndarray) -> list[float | None]:
    return [float(total / count) if count else None for total, count in table.T]


def _by_workload(routed: RoutedLayer, experts: int) -> np.ndarray:
    """Active experts, largest workload first."""
    votes = _votes(routed.routing, experts)
    return np.argsort(-votes, kind="stable")[: len(routed.experts)]


def _votes(choices: np.ndarray, experts: int) -> np.ndarray:
    """Votes [E] of choices [T, K], best first: one per token, ties broken by ranks."""
    tokens, top_k = choices.shape
    # A token's vote outweighs any sum of ranks.
    worth = tokens * top_k + 1 + top_k - np.arange(top_k)
    return np.bincount(choices.reshape(-1), np.tile(worth, tokens), experts)


@compiled(nb.void(_RANKING, _RANKING, nb.int64, nb.float64[:, ::1], nb.float64[:, ::1]))
def _add_overlaps(
    predicted: np.ndarray,
    truth: np.ndarray,
    layer: int,
    by_layer: np.ndarray,
    by_rank: np.ndarray,
) -> None:
    """Add the overlaps of the first r of two rankings, for every r, to `by_rank` [2,
    R], and that of all of `truth` to `by_layer` [2, L].
    """
    true_rank = np.full(len(predicted), len(predicted), np.int64)
    for rank in range(len(truth)):
        true_rank[truth[rank]] = rank

    common = 0
    for rank in range(len(truth)):
        # With each rank two experts come in: one predicted, one true.
        common += true_rank[predicted[rank]] <= rank
        for earlier in range(rank):
            common += true_rank[predicted[earlier]] == rank
        if rank < by_rank.shape[1]:
            by_rank[0, rank] += common / (rank + 1)
            by_rank[1, rank] += 1

    by_layer[0, layer] += common / len(truth)
    by_layer[1, layer] += 1

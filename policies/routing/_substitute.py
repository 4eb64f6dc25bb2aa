"""Substitution of experts, and the combine weights that follow from it.

Shared by the routing policies that replace experts.

T tokens, K experts per token, E experts of the layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.base import Routing

if TYPE_CHECKING:
    from moesim.policies.base import Gate, MachineView

UNUSED = 65535
"""Marks a column that no expert takes; its weight is 0."""

# Keeps the division by a sum of scores, which may be 0, harmless.
SMALLEST = 1e-30
"""Least divisor of a normalisation."""


def scores_of(gate: Gate) -> np.ndarray:
    """The gate's scores, float64 [T, E]; a run whose trace lacks them was refused
    before it started.
    """
    assert gate.scores is not None, (
        "a policy that needs scores was started without them"
    )
    return gate.scores.astype(np.float64)


def chosen_mask(experts: np.ndarray, width: int) -> np.ndarray:
    """Bool [T, E]: the experts each token has, from ids [T, K]."""
    mask = np.zeros((len(experts), width), dtype=np.bool_)
    np.put_along_axis(mask, experts.astype(np.int64), values=True, axis=1)
    return mask


def ranked(scores: np.ndarray) -> np.ndarray:
    """Ids by descending score in each row, ties to the lower id: int64 [T, E]."""
    return np.argsort(-scores, axis=1, kind="stable")


def substitute(
    experts: np.ndarray, replace: np.ndarray, rank: np.ndarray
) -> np.ndarray:
    """Replace the marked experts by the best alternatives.

    A token with fewer alternatives than marked experts keeps the first of those, which
    are its best.

    Args:
        experts: int64 [T, K], best first.
        replace: bool [T, K], columns that are up for replacement.
        rank: float64 [T, E], higher is better (ties to the lower id), minus infinity
            for what is no alternative.

    Returns:
        int64 [T, K].
    """
    if not replace.any():
        return experts

    marked = replace.sum(axis=1)
    available = (rank > -np.inf).sum(axis=1)
    replaced = np.minimum(marked, available)
    best = ranked(rank)[:, : experts.shape[1]]

    # The n-th marked column takes alternative n, less those that stay in front of it.
    kept = (marked - replaced)[:, None]
    alternative = np.cumsum(replace, axis=1) - 1 - kept
    newcomers = np.take_along_axis(best, np.maximum(alternative, 0), axis=1)
    return np.where(replace & (alternative >= 0), newcomers, experts)


def routing(
    gate: Gate,
    experts: np.ndarray,
    view: MachineView,
    *,
    predicted: np.ndarray | None = None,
) -> Routing:
    """Pack the experts used with their combine weights.

    A token that keeps its experts keeps its recorded weights. Elsewhere every expert
    counts with its own score, brought to the recorded scale: the sum of weights stays
    where the model normalises over the top k, else the ratio of weight to score.
    Without recorded weights that scale is 1.

    Args:
        gate: what was recorded.
        experts: ids [T, K'], `UNUSED` in unused columns.
        view: knows the model's shape.
        predicted: scores [T, E] by which the experts were chosen instead of the gate's
            own; then no token keeps its recorded weights, as the gate was never
            evaluated.
    """
    scores = scores_of(gate)
    recorded = gate.experts.astype(np.int64)
    used = scores if predicted is None else predicted.astype(np.float64)

    # One column of zeros more, to which the id of an unused column is sent.
    padded = np.pad(used, ((0, 0), (0, 1)))
    ids = np.minimum(experts, scores.shape[1]).astype(np.int64)
    expert_scores = np.take_along_axis(padded, ids, axis=1)

    if view.shape.norm_topk:
        base = expert_scores.sum(axis=1)
        total = np.ones(len(expert_scores))
    else:
        base = np.take_along_axis(scores, recorded, axis=1).sum(axis=1)
        total = base
    if gate.weights is not None:
        total = gate.weights.astype(np.float64).sum(axis=1)
    scale = total / np.maximum(base, SMALLEST)
    weights = expert_scores * scale[:, None]

    extra = experts.shape[1] - recorded.shape[1]
    if gate.weights is not None and predicted is None and extra >= 0:
        # Recorded weights are exact; recomputed ones would differ by rounding.
        widths = ((0, 0), (0, extra))
        widened = np.pad(recorded, widths, constant_values=UNUSED)
        same = (experts == widened).all(axis=1)
        weights[same] = np.pad(gate.weights, widths)[same]
    return Routing(experts.astype(np.uint16), weights.astype(np.float32))

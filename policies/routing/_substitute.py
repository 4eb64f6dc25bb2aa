"""Substitution of experts, and the combine weights that follow from it.

Shared by the routing policies that replace experts.

T tokens, K experts per token, E experts of the layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import Routing
from moesim.policies.ranking import ranked

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


def chosen_mask(
    experts: np.ndarray,
    width: int,
) -> np.ndarray:
    """Bool [T, E]: the experts each token has, from ids [T, K]."""
    mask = np.zeros((len(experts), width), dtype=np.bool_)
    np.put_along_axis(
        mask,
        experts.astype(np.int64),
        values=True,
        axis=1,
    )
    return mask


def values_at(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Entries [T, K] of `values` [T, E] at the `ids` [T, K] of each row."""
    return np.take_along_axis(values, ids, axis=1)


def substitute(
    experts: np.ndarray,
    replace: np.ndarray,
    scores: np.ndarray,
    alternatives: np.ndarray,
) -> np.ndarray:
    """Replace the marked experts by the best alternatives.

    A token with fewer alternatives than marked experts keeps the first of those, which
    are its best.

    Args:
        experts: int64 [T, K], best first.
        replace: bool [T, K], columns that are up for replacement.
        scores: float64 [T, E], higher is better, ties to the lower id.
        alternatives: bool [T, E], experts that may enter.

    Returns:
        int64 [T, K].
    """
    if not replace.any():
        return experts

    marked = replace.sum(axis=1)
    available = alternatives.sum(axis=1)
    replaced = np.minimum(marked, available)
    top_k = experts.shape[1]
    best = ranked(scores, among=alternatives)[:, :top_k]

    # The n-th marked column takes alternative n, less those that stay in front of it.
    kept = (marked - replaced)[:, None]
    alternative = np.cumsum(replace, axis=1) - 1 - kept
    newcomers = values_at(best, np.maximum(alternative, 0))
    takes_one = replace & (alternative >= 0)
    return np.where(takes_one, newcomers, experts)


def keep_one_absent(
    experts: np.ndarray,
    scores: np.ndarray,
    resident: np.ndarray,
) -> np.ndarray:
    """DAOP's degradation: a token keeps its best absent expert, and the next-best
    residents replace the others.

    Args:
        experts: int64 [T, K], best first.
        scores: float64 [T, E], by which they were chosen.
        resident: bool [E].

    Returns:
        int64 [T, K].
    """
    absent = ~resident[experts]
    # Columns stand best first: the first absent one is the one that may stay.
    further = absent & (np.cumsum(absent, axis=1) > 1)
    alternatives = resident & ~chosen_mask(experts, scores.shape[1])
    return substitute(experts, further, scores, alternatives)


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
    width = scores.shape[1]
    padded = np.zeros((len(used), width + 1))
    padded[:, :width] = used
    ids = np.minimum(experts, width).astype(np.int64)
    expert_scores = values_at(padded, ids)

    if view.shape.norm_topk:
        base = expert_scores.sum(axis=1)
        total = np.ones(len(expert_scores))
    else:
        base = values_at(scores, recorded).sum(axis=1)
        total = base
    if gate.weights is not None:
        recorded_weights = gate.weights.astype(np.float64)
        total = recorded_weights.sum(axis=1)
    scale = total / np.maximum(base, SMALLEST)
    weights = expert_scores * scale[:, None]

    top_k = recorded.shape[1]
    extra = experts.shape[1] - top_k
    if gate.weights is not None and predicted is None and extra >= 0:
        same_experts = (experts[:, :top_k] == recorded).all(axis=1)
        no_more = (experts[:, top_k:] == UNUSED).all(axis=1)
        same = same_experts & no_more
        # Recorded weights are exact; recomputed ones would differ by rounding.
        weights[same, :top_k] = gate.weights[same]
        weights[same, top_k:] = 0.0
    return Routing(
        experts=experts.astype(np.uint16),
        weights=weights.astype(np.float32),
    )

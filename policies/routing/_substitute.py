"""What the routing policies share: who takes whose place, and with which weight.

T tokens, K experts per token, E experts of the layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.base import Routing

if TYPE_CHECKING:
    from moesim.policies.base import Gate, MachineView

UNUSED = 65535
"""Marks a place that no expert takes; its weight is 0."""


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


def substitute(
    experts: np.ndarray, replace: np.ndarray, rank: np.ndarray
) -> np.ndarray:
    """Give the marked experts' places to the best alternatives.

    A token with fewer alternatives than marked experts keeps the first of those, which
    are its best.

    Args:
        experts: int64 [T, K], best first.
        replace: bool [T, K], places that are up for replacement.
        rank: float64 [T, E], higher is better (ties to the lower id), minus infinity
            for what is no alternative.

    Returns:
        int64 [T, K].
    """
    if not replace.any():
        return experts
    marked = replace.sum(axis=1)
    found = np.minimum(marked, (rank > -np.inf).sum(axis=1))
    best = np.argsort(-rank, axis=1, kind="stable")[:, : experts.shape[1]]
    place = np.cumsum(replace, axis=1) - 1 - (marked - found)[:, None]
    newcomers = np.take_along_axis(best, np.maximum(place, 0), axis=1)
    return np.where(replace & (place >= 0), newcomers, experts)


def routing(
    gate: Gate,
    experts: np.ndarray,
    view: MachineView,
    *,
    said: np.ndarray | None = None,
) -> Routing:
    """Pack the experts used with their combine weights.

    A token that keeps its experts keeps its recorded weights. Elsewhere every expert
    counts with its own score, brought to the recorded scale: the sum of weights stays
    where the model normalises over the top k, else the ratio of weight to score.
    Without recorded weights that scale is 1.

    Args:
        gate: what was recorded.
        experts: ids [T, K'], `UNUSED` in unused places.
        view: knows the model's shape.
        said: scores [T, E] by which the experts were chosen instead of the gate's own,
            such as a prediction; then no token keeps its recorded weights, for nobody
            asked the gate.
    """
    scores = scores_of(gate)
    recorded = gate.experts.astype(np.int64)
    padded = np.pad(
        scores if said is None else said.astype(np.float64), ((0, 0), (0, 1))
    )
    own = np.take_along_axis(
        padded, np.minimum(experts, scores.shape[1]).astype(np.int64), axis=1
    )
    base = (
        own.sum(axis=1)
        if view.shape.norm_topk
        else np.take_along_axis(scores, recorded, axis=1).sum(axis=1)
    )
    total = np.ones(len(own)) if view.shape.norm_topk else base
    if gate.weights is not None:
        total = gate.weights.astype(np.float64).sum(axis=1)
    weights = own * (total / np.maximum(base, 1e-30))[:, None]
    more = experts.shape[1] - recorded.shape[1]
    if gate.weights is not None and said is None and more >= 0:
        same = (
            experts == np.pad(recorded, ((0, 0), (0, more)), constant_values=UNUSED)
        ).all(axis=1)
        weights[same] = np.pad(gate.weights, ((0, 0), (0, more)))[same]
    return Routing(experts.astype(np.uint16), weights.astype(np.float32))

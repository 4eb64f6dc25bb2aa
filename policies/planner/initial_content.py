"""What a cache holds before the run begins."""

from __future__ import annotations

import numpy as np
from moesim.policies.planner.residency import GLOBAL


def fitting(
    rank: np.ndarray,
    capacity_slots: np.ndarray,
    scope: str,
    served: np.ndarray | None = None,
) -> np.ndarray:
    """Flat keys, int64 ascending, of the most wanted experts that fit.

    Args:
        rank: float64 [L, E], lowest for the most wanted; ties go to the lower key.
        capacity_slots: slots of each layer, or one entry for the global scope, which
            ranks the whole model at once.
        scope: ``layer`` or ``global``.
        served: bool [L], layers that may be there; None for all.
    """
    layers, experts = rank.shape
    here = np.ones(layers, np.bool_) if served is None else served
    if scope == GLOBAL:
        order = np.argsort(rank, axis=None, kind="stable")
        return np.sort(order[here[order // experts]][: int(capacity_slots[0])])
    by_layer = np.argsort(rank, axis=1, kind="stable")
    slots = np.where(here, capacity_slots, 0).tolist()
    filled = [
        layer * experts + by_layer[layer, : slots[layer]] for layer in range(layers)
    ]
    return np.sort(np.concatenate(filled)).astype(np.int64)

"""What a cache holds before the run begins."""

from __future__ import annotations

import numpy as np

from policies.residency import GLOBAL


def fitting(rank: np.ndarray, capacity_slots: np.ndarray, scope: str) -> np.ndarray:
    """Flat keys, int64 ascending, of the most wanted experts that fit.

    Args:
        rank: float64 [L, E], lowest for the most wanted; ties go to the lower key.
        capacity_slots: slots of each layer, or one entry for the global scope, which ranks the whole model at once.
        scope: ``layer`` or ``global``.
    """
    if scope == GLOBAL:
        return np.sort(np.argsort(rank, axis=None, kind="stable")[: int(capacity_slots[0])])
    by_layer = np.argsort(rank, axis=1, kind="stable")
    experts = rank.shape[1]
    filled = [layer * experts + by_layer[layer, :slots] for layer, slots in enumerate(capacity_slots.tolist())]
    return np.sort(np.concatenate(filled)).astype(np.int64)

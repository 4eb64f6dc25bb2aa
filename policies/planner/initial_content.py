"""What a cache holds before the run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.planner.residency import GLOBAL

if TYPE_CHECKING:
    from collections.abc import Sequence


def fitting(
    rank: np.ndarray,
    capacity_slots: np.ndarray,
    scope: str,
    served: np.ndarray | None = None,
    *,
    pool_bytes: np.ndarray | None = None,
    expert_bytes: Sequence[int] = (),
) -> np.ndarray:
    """Flat keys, int64 ascending, of the most wanted experts that fit.

    Args:
        rank: float64 [L, E], lowest for the most wanted; ties go to the lower key.
        capacity_slots: slots of each layer, or one entry for the global scope, which
            ranks the whole model at once.
        scope: ``layer`` or ``global``.
        served: bool [L], layers that may be there; None for all.
        pool_bytes: bytes of each pool, with which a global pool of unequal experts is
            filled to less than one expert; None counts slots.
        expert_bytes: bytes of one expert of each layer, if `pool_bytes` are given.
    """
    layers, experts = rank.shape
    here = np.ones(layers, np.bool_) if served is None else served
    if scope == GLOBAL:
        order = np.argsort(rank, axis=None, kind="stable")
        order = order[here[order // experts]]
        if pool_bytes is None:
            return np.sort(order[: int(capacity_slots[0])])
        sizes = np.asarray(expert_bytes, np.int64)[order // experts]
        return np.sort(order[first_fit(sizes, int(pool_bytes[0]))])
    by_layer = np.argsort(rank, axis=1, kind="stable")
    slots = np.where(here, capacity_slots, 0).tolist()
    filled = [
        layer * experts + by_layer[layer, : slots[layer]] for layer in range(layers)
    ]
    return np.sort(np.concatenate(filled)).astype(np.int64)


def first_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """Bool [N]: which of `sizes`, int64 [N], are taken if each that still fits is."""
    taken = np.zeros(len(sizes), np.bool_)
    start = 0
    # One round per size that does not fit: all of it is skipped, so rounds are few.
    while start < len(sizes):
        filled = np.cumsum(sizes[start:])
        count = int(np.searchsorted(filled, room, side="right"))
        taken[start : start + count] = True
        if count:
            room -= int(filled[count - 1])
        start += count
        smaller = np.flatnonzero(sizes[start:] <= room)
        if not len(smaller):
            break
        start += int(smaller[0])
    return taken

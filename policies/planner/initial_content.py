"""What a cache holds before the run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.planner.residency import GLOBAL

if TYPE_CHECKING:
    from moesim.traces.format.schema import ModelShape


def fitting(
    rank: np.ndarray,
    capacity_slots: np.ndarray,
    scope: str,
    served: np.ndarray | None = None,
    *,
    pool_bytes: np.ndarray | None = None,
    shape: ModelShape | None = None,
) -> np.ndarray:
    """Flat keys, int64 ascending, of the most wanted experts that fit.

    Args:
        rank: float64 [L, E], lowest for the most wanted; ties go to the lower key.
        capacity_slots: slots of each layer, or one entry for the global scope, which
            ranks the whole model at once.
        scope: ``layer`` or ``global``.
        served: bool [L], layers that may be there; None for all.
        pool_bytes: bytes of each pool, with which a pool of unequal experts is filled
            to less than one expert; None counts slots.
        shape: the model, whose experts have sizes, if `pool_bytes` are given.
    """
    layers, experts = rank.shape
    here = np.ones(layers, np.bool_) if served is None else served
    if scope == GLOBAL:
        order = np.argsort(rank, axis=None, kind="stable")
        order = order[here[order // experts]]
        if pool_bytes is None or shape is None:
            return np.sort(order[: int(capacity_slots[0])])
        sizes = np.array(shape.sizes_by_expert(), np.int64).reshape(-1)[order]
        return np.sort(order[first_fit(sizes, int(pool_bytes[0]))])
    by_layer = np.argsort(rank, axis=1, kind="stable")
    if shape is not None and shape.bytes_by_expert and pool_bytes is not None:
        taken = np.zeros(rank.shape, np.bool_)
        for layer in np.flatnonzero(here).tolist():
            order = by_layer[layer]
            sizes = np.array(shape.bytes_by_expert[layer], np.int64)[order]
            taken[layer, order] = first_fit(sizes, int(pool_bytes[layer]))
        return np.flatnonzero(taken)
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

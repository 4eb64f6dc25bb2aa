"""Stable sorting of experts, so that ties go to the lower id; and which are present."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView


def lowest_first(ids: np.ndarray, value: np.ndarray) -> np.ndarray:
    """`ids` [N] by ascending `value` [N]; equal ones keep their order, so that in
    ascending `ids` the lower comes first.
    """
    # NumPy's default sort is not stable.
    return ids[np.argsort(value, kind="stable")]


def highest_first(ids: np.ndarray, value: np.ndarray) -> np.ndarray:
    """As `lowest_first`, by descending `value`."""
    # Negated instead of reversed: a reversed order would reverse the ties, too.
    return ids[np.argsort(-value, kind="stable")]


def best_of(scores: Floats, among: Ints, best: Ints) -> int:
    """Find the experts of highest score, ties to the lower id, best first.

    Args:
        scores: float64 [E].
        among: uint8 [E], 1 for experts that count.
        best: int64 [M], filled in with at most M ids.

    Returns:
        How many.
    """
    count = 0
    for expert in range(len(scores)):
        if not among[expert]:
            continue
        rank = count
        while rank > 0 and scores[best[rank - 1]] < scores[expert]:
            rank -= 1
        if rank == len(best):
            continue
        count = min(count + 1, len(best))
        for n in range(count - 1, rank, -1):
            best[n] = best[n - 1]
        best[rank] = expert
    return count


def ranked(scores: np.ndarray, among: np.ndarray | None = None) -> np.ndarray:
    """Ids by descending score, ties to the lower id: int64, same shape as `scores`.

    Args:
        scores: float [E], or [T, E] to rank each row by itself.
        among: bool, same shape; experts outside it come last. None for all.
    """
    if among is not None:
        scores = np.where(among, scores, -np.inf)
    return np.argsort(-scores, axis=-1, kind="stable")


def present(view: MachineView, layer: int, *, in_flight: bool = True) -> np.ndarray:
    """Bool [E]: experts of a layer that are on some GPU, or (unless `in_flight` is
    false) on their way to one.
    """
    mask = view.resident(layer)
    for gpu in range(view.gpus):
        if gpu:
            mask = mask | view.resident(layer, gpu)
        if in_flight:
            mask = mask | view.in_flight(layer, gpu)
    return mask

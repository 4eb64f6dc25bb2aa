"""Stable sorting of experts, so that ties go to the lower id."""

from __future__ import annotations

import numpy as np


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


def ranked(scores: np.ndarray, among: np.ndarray | None = None) -> np.ndarray:
    """Ids by descending score, ties to the lower id: int64, same shape as `scores`.

    Args:
        scores: float [E], or [T, E] to rank each row by itself.
        among: bool, same shape; experts outside it come last. None for all.
    """
    if among is not None:
        scores = np.where(among, scores, -np.inf)
    return np.argsort(-scores, axis=-1, kind="stable")

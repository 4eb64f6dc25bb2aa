"""How much of what the gate wanted an altered routing keeps."""

from __future__ import annotations

import numpy as np

_NO_MASS = 1e-30
"""Stands for a sum of zero, which cannot divide."""


def gate_mass_kept(scores: np.ndarray, recorded: np.ndarray, used: np.ndarray) -> float:
    """Share of the recorded experts' gate scores that the used experts have, mean over
    tokens.

    Args:
        scores: float [T, E]; recorded, used: ids [T, K]; ids >= E are unused places.
    """
    # Unused places read a column of zeros behind the experts'.
    zeros = np.zeros((len(scores), 1))
    padded = np.concatenate((scores.astype(np.float64), zeros), axis=1)
    columns = np.minimum(used.astype(np.int64), scores.shape[1])
    kept = np.take_along_axis(padded, columns, axis=1).sum(axis=1)
    wanted = np.take_along_axis(padded, recorded.astype(np.int64), axis=1).sum(axis=1)
    return float(np.mean(kept / np.maximum(wanted, _NO_MASS)))


def weight_kept(weights: np.ndarray, recorded: np.ndarray, used: np.ndarray) -> float:
    """As `gate_mass_kept`, where a trace has combine weights only: substitutes count
    for nothing.

    Args:
        weights: float [T, K] of the recorded experts; recorded, used: ids [T, K].
    """
    kept = (recorded[:, :, None] == used[:, None, :]).any(axis=2)
    wanted = weights.astype(np.float64)
    shares = (wanted * kept).sum(axis=1) / np.maximum(wanted.sum(axis=1), _NO_MASS)
    return float(np.mean(shares))

"""MoE-Infinity's expert activation matrices: the workload of whole sequences by layer.

A calibration can hand matrices of finished sequences to policies as
``extras["activation_matrices"]``, float64 [N, L, E]: for each of N sequences, how many
tokens every expert served.
"""

from __future__ import annotations

import numpy as np

# Lengths below this count as 0, so that empty rows stay empty.
_SMALLEST = 1e-30


class ActivationStore:
    """Keeps the matrices of finished sequences and compares the running one with all of
    them, layer by layer.

    Cosines change only for the layer that was just observed, so each layer step costs
    one product with [N, E]. A full store forgets the matrix that was most similar least
    often; calibrated ones stay.

    Args:
        known: float64 [N, L, E] calibrated matrices, N may be 0.
        capacity: matrices kept in all.

    Attributes:
        current: float64 [L, E], the running sequence.
    """

    def __init__(
        self,
        known: np.ndarray,
        capacity: int,
    ) -> None:
        known = known[:capacity]
        self._capacity = capacity
        self._calibrated = len(known)
        self._counts = known.astype(np.float32)
        self._unit = _rows_to_unit(self._counts)
        self._matches = np.ones(len(known))
        self.current = np.zeros(known.shape[1:])
        self._cosine = np.zeros(known.shape[:2])

    def __len__(self) -> int:
        """How many finished sequences are kept."""
        return len(self._counts)

    def observe(
        self,
        layer: int,
        experts: np.ndarray,
        tokens: np.ndarray,
    ) -> None:
        """Count the tokens of a layer step into the running sequence."""
        self.current[layer, experts] += tokens
        row = self.current[layer]
        length = float(np.linalg.norm(row))
        unit = row / max(length, _SMALLEST)
        # Only this layer's cosines have moved.
        self._cosine[:, layer] = self._unit[:, layer] @ unit

    def most_similar(self, layers: slice) -> np.ndarray:
        """The finished matrix whose rows of `layers` look most like the running one's,
        ties to the older: [L, E].
        """
        similarity = self._cosine[:, layers].sum(axis=1)
        best = int(similarity.argmax())
        self._matches[best] += 1
        return self._counts[best]

    def finish(self) -> None:
        """Store the running sequence, if it has begun, and start an empty one."""
        if self.current.any() and self._capacity > self._calibrated:
            counts = self.current[None].astype(np.float32)
            unit = _rows_to_unit(counts)
            if len(self) < self._capacity:
                self._counts = np.concatenate((self._counts, counts))
                self._unit = np.concatenate((self._unit, unit))
                self._matches = np.append(self._matches, 1.0)
            else:
                # Calibrated matrices stand in front and are never replaced.
                learned = self._matches[self._calibrated :]
                index = self._calibrated + int(learned.argmin())
                self._counts[index] = counts[0]
                self._unit[index] = unit[0]
                self._matches[index] = 1.0
        layers = len(self.current)
        self.current = np.zeros_like(self.current)
        self._cosine = np.zeros((len(self), layers))


def _rows_to_unit(matrices: np.ndarray) -> np.ndarray:
    """Rows of length 1; empty rows stay empty. [N, L, E]."""
    length = np.linalg.norm(matrices, axis=2, keepdims=True)
    return matrices / np.maximum(length, _SMALLEST)

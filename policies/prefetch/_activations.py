"""What whole sequences asked of every layer: MoE-Infinity's expert activation matrices.

A calibration can hand finished ones to policies as ``extras["activation_matrices"]``,
float64 [N, L, E]: for each of N sequences, how many tokens every expert served.
"""

from __future__ import annotations

import numpy as np


class ActivationStore:
    """Keeps the matrices of finished sequences and compares the running one with all of
    them, layer by layer.

    Cosines change only for the layer that was just observed, so each layer step costs
    one product with [N, E]. A full store forgets the matrix that was found most similar
    least often; calibrated ones stay.

    Args:
        known: float64 [N, L, E] calibrated matrices, N may be 0.
        capacity: matrices kept in all.
    """

    def __init__(self, known: np.ndarray, capacity: int) -> None:
        known = known[:capacity]
        self._capacity = capacity
        self._fixed = len(known)
        self._counts = known.astype(np.float32)
        self._unit = _rows_to_unit(self._counts)
        self._found = np.ones(len(known))
        self.current = np.zeros(known.shape[1:])
        self._cosine = np.zeros(known.shape[:2])

    def __len__(self) -> int:
        """How many finished sequences are kept."""
        return len(self._counts)

    def observe(self, layer: int, experts: np.ndarray, tokens: np.ndarray) -> None:
        """Count the tokens of a layer step into the running sequence."""
        self.current[layer, experts] += tokens
        row = self.current[layer]
        self._cosine[:, layer] = self._unit[:, layer] @ (
            row / max(float(np.linalg.norm(row)), 1e-30)
        )

    def most_similar(self, layers: slice) -> np.ndarray:
        """The finished matrix whose rows of `layers` look most like the running one's,
        ties to the older: [L, E].
        """
        best = int(self._cosine[:, layers].sum(axis=1).argmax())
        self._found[best] += 1
        return self._counts[best]

    def finish(self) -> None:
        """Store the running sequence, if it has begun, and start an empty one."""
        if self.current.any() and self._capacity > self._fixed:
            new = self.current[None].astype(np.float32)
            if len(self) < self._capacity:
                self._counts = np.concatenate((self._counts, new))
                self._unit = np.concatenate((self._unit, _rows_to_unit(new)))
                self._found = np.append(self._found, 1.0)
            else:
                place = self._fixed + int(self._found[self._fixed :].argmin())
                self._counts[place], self._unit[place], self._found[place] = (
                    new[0],
                    _rows_to_unit(new)[0],
                    1.0,
                )
        self.current = np.zeros_like(self.current)
        self._cosine = np.zeros((len(self), len(self.current)))


def _rows_to_unit(matrices: np.ndarray) -> np.ndarray:
    """Rows of length 1; empty rows stay empty. [N, L, E]."""
    return matrices / np.maximum(np.linalg.norm(matrices, axis=2, keepdims=True), 1e-30)

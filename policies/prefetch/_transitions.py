"""Which expert follows which, from one MoE layer to the next: the table behind
statistical prefetching.

A calibration can hand it to policies as ``extras["transitions"]``, float64 [L, E, E]:
entry ``[l, a, e]`` is the probability that a token which chose expert `a` in layer `l`
chooses `e` in layer `l + 1`. Rows sum to the number of experts per token, or to 0 where
`a` was never seen; the last layer's rows are 0.
"""

from __future__ import annotations

import numpy as np


class Transitions:
    """Counts pairs of experts that served one token in neighbouring layers. L layers, E
    experts of a layer.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.experts = experts
        self._pairs = np.zeros((layers, experts, experts))
        self._seen = np.zeros((layers, experts))

    def observe(self, layer: int, before: np.ndarray, after: np.ndarray) -> None:
        """Note the same tokens' experts in `layer` and in the one after it.

        Args:
            layer: the earlier layer.
            before: ids [T, K]; unused places hold ids >= E.
            after: ids [T, K'], row by row the same tokens.
        """
        before = before.astype(np.int64)
        after = after.astype(np.int64)
        used = before < self.experts
        np.add.at(self._seen[layer], before[used], 1.0)
        pairs = used[:, :, None] & (after < self.experts)[:, None, :]
        first = np.broadcast_to(before[:, :, None], pairs.shape)[pairs]
        then = np.broadcast_to(after[:, None, :], pairs.shape)[pairs]
        np.add.at(self._pairs[layer].reshape(-1), first * self.experts + then, 1.0)

    def rows(self, layer: int, experts: np.ndarray) -> np.ndarray:
        """Probabilities of what follows some experts of a layer: float64 [A, E]."""
        return (
            self._pairs[layer, experts]
            / np.maximum(self._seen[layer, experts], 1.0)[:, None]
        )

    def table(self) -> np.ndarray:
        """The whole table: float64 [L, E, E]."""
        return self._pairs / np.maximum(self._seen, 1.0)[:, :, None]

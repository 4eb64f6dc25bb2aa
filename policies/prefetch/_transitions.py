"""Transition table: which expert follows which, from one MoE layer to the next.

A calibration can hand it to policies as ``extras["transitions"]``, float64 [L, E, E]:
entry ``[l, a, e]`` is the probability that a token which chose expert `a` in layer `l`
chooses `e` in layer `l + 1`. Rows sum to the number of experts per token, or to 0 where
`a` was never seen; the last layer's rows are 0.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np


class Transitions:
    """Counts pairs of experts that served one token in neighbouring layers. L layers, E
    experts of a layer.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.experts = experts
        self._pairs = np.zeros((layers, experts, experts))
        self._seen = np.zeros((layers, experts))

    def observe(
        self,
        layer: int,
        before: np.ndarray,
        after: np.ndarray,
    ) -> None:
        """Note the same tokens' experts in `layer` and in the one after it.

        Args:
            layer: the earlier layer.
            before: ids [T, K]; unused columns hold ids >= E.
            after: ids [T, K'], row by row the same tokens.
        """
        # Wider integers, as pairs are numbered `first * E + second`.
        before = before.astype(np.int64)
        after = after.astype(np.int64)
        used_before = before < self.experts
        used_after = after < self.experts
        np.add.at(self._seen[layer], before[used_before], 1.0)

        pairs = used_before[:, :, None] & used_after[:, None, :]
        first = np.broadcast_to(before[:, :, None], pairs.shape)[pairs]
        second = np.broadcast_to(after[:, None, :], pairs.shape)[pairs]
        flat = self._pairs[layer].reshape(-1)
        np.add.at(flat, first * self.experts + second, 1.0)

    def rows(
        self,
        layer: int,
        experts: np.ndarray,
    ) -> np.ndarray:
        """Probabilities of what follows some experts of a layer: float64 [A, E]."""
        seen = np.maximum(self._seen[layer, experts], 1.0)
        return self._pairs[layer, experts] / seen[:, None]

    def table(self) -> np.ndarray:
        """The full table: float64 [L, E, E]."""
        # At least 1, so that rows that were never seen stay 0.
        seen = np.maximum(self._seen, 1.0)
        return self._pairs / seen[:, :, None]


class PairTransitions:
    """Counts what followed a token's expert in one layer and another in the next. E
    experts of a layer.

    Few of the E² pairs ever occur, so rows are made when they are first seen.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts
        # (layer of the second, first * E + second) -> counts [E], and how often seen.
        self._followers: dict[tuple[int, int], np.ndarray] = {}
        self._seen: dict[tuple[int, int], int] = defaultdict(int)

    def observe(
        self, layer: int, first: np.ndarray, second: np.ndarray, after: np.ndarray
    ) -> None:
        """Note the same tokens' experts in three layers.

        Args:
            layer: the second one.
            first, second, after: ids [T, K]; unused columns hold ids >= E.
        """
        for pairs, chosen in zip(self._pairs(first, second), after, strict=True):
            used = chosen[chosen < self.experts]
            for pair in pairs:
                key = layer, pair
                if key not in self._followers:
                    self._followers[key] = np.zeros(self.experts)
                self._followers[key][used] += 1.0
                self._seen[key] += 1

    def workload(
        self, layer: int, first: np.ndarray, second: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Predict the workload of the layer behind `layer`: float64 [E].

        A token's estimate is the mean over its pairs that were seen before.

        Returns:
            The workload, and which tokens have no such pair: bool [T].
        """
        workload = np.zeros(self.experts)
        unseen = np.ones(len(second), np.bool_)
        for token, pairs in enumerate(self._pairs(first, second)):
            keys = [(layer, pair) for pair in pairs if (layer, pair) in self._followers]
            for key in keys:
                workload += self._followers[key] / self._seen[key] / len(keys)
            unseen[token] = not keys
        return workload, unseen

    def _pairs(self, first: np.ndarray, second: np.ndarray) -> list[list[int]]:
        """Numbers of each token's pairs, those of unused columns left out."""
        # Wider integers, as pairs are numbered `first * E + second`.
        first = first.astype(np.int64)
        second = second.astype(np.int64)
        return [
            [a * self.experts + b for a in earlier for b in later]
            for earlier, later in zip(
                [row[row < self.experts].tolist() for row in first],
                [row[row < self.experts].tolist() for row in second],
                strict=True,
            )
        ]

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
        pairs = self._pairs(first, second)
        seen, times = np.unique(pairs[pairs >= 0], return_counts=True)
        for pair, count in zip(seen.tolist(), times.tolist(), strict=True):
            self._seen[layer, pair] += count

        # All followers of one pair stand together in ascending order.
        after = after.astype(np.int64)
        followed = pairs[:, :, None] * self.experts + after[:, None, :]
        used = (pairs[:, :, None] >= 0) & (after[:, None, :] < self.experts)
        followed, times = np.unique(followed[used], return_counts=True)
        owners, starts = np.unique(followed // self.experts, return_index=True)
        edges = [*starts.tolist(), len(followed)]
        for pair, begin, end in zip(owners.tolist(), edges, edges[1:], strict=False):
            row = self._followers.setdefault((layer, pair), np.zeros(self.experts))
            row[followed[begin:end] % self.experts] += times[begin:end]

    def workload(
        self, layer: int, first: np.ndarray, second: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Predict the workload of the layer behind `layer`: float64 [E].

        A token's estimate is the mean over its pairs that were seen before.

        Returns:
            The workload, and which tokens have no such pair: bool [T].
        """
        pairs, place = np.unique(self._pairs(first, second), return_inverse=True)
        place = place.reshape(len(second), -1)
        known = np.array([(layer, pair) in self._followers for pair in pairs.tolist()])
        counted = known[place].sum(axis=1, keepdims=True)
        share = known[place] / np.maximum(counted, 1)
        weight = np.bincount(place.reshape(-1), share.reshape(-1), len(pairs))

        workload = np.zeros(self.experts)
        for pair, tokens in zip(pairs[known].tolist(), weight[known], strict=True):
            key = layer, pair
            workload += tokens * self._followers[key] / self._seen[key]
        return workload, counted[:, 0] == 0

    def _pairs(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Numbers of each token's pairs, int64 [T, K²]; -1 for unused columns."""
        # Wider integers, as pairs are numbered `first * E + second`.
        first = first.astype(np.int64)[:, :, None]
        second = second.astype(np.int64)[:, None, :]
        used = (first < self.experts) & (second < self.experts)
        pairs = np.where(used, first * self.experts + second, -1)
        return pairs.reshape(len(pairs), -1)

"""Transition table: which expert follows which, from one MoE layer to the next.

A calibration can hand it to policies as ``extras["transitions"]``, float64 [L, E, E]:
entry ``[l, a, e]`` is the probability that a token which chose expert `a` in layer `l`
chooses `e` in layer `l + 1`. Rows sum to the number of experts per token, or to 0 where
`a` was never seen; the last layer's rows are 0.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Self

import numpy as np
from numba import types as nb

from moesim.traces.compilation import compiled, input_array

_ROUTING = input_array(nb.uint16, 2)
_IDS = input_array(nb.int32)


@compiled(nb.void(nb.float64[:, ::1], nb.int64[::1], nb.int64, _ROUTING, _ROUTING))
def count_pairs(
    pairs: np.ndarray,
    seen: np.ndarray,
    first: int,
    before: np.ndarray,
    after: np.ndarray,
) -> None:
    """Count the experts of the same tokens in a layer and in the one after it.

    Args:
        pairs: float64 [L * E, E], how often each expert of a layer was followed by each
            of the next.
        seen: int64 [L * E], how often each was chosen.
        first: key of the earlier layer's first expert.
        before, after: ids [T, K] in both layers; unused columns hold ids >= E.
    """
    experts = pairs.shape[1]
    for t in range(len(before)):
        for a in before[t]:
            if a >= experts:
                continue
            seen[first + a] += 1
            for e in after[t]:
                if e < experts:
                    pairs[first + a, e] += 1.0


@compiled(
    nb.float64[::1](
        input_array(nb.float64, 2), input_array(nb.int64), nb.int64, _IDS, _IDS
    )
)
def following_workload(
    pairs: np.ndarray,
    seen: np.ndarray,
    first: int,
    experts: np.ndarray,
    tokens: np.ndarray,
) -> np.ndarray:
    """Predict the next layer's workload, float64 [E], of a layer's active `experts` [A]
    and their `tokens` [A].

    What was never seen predicts nothing. `pairs`, `seen` and `first` as in
    `count_pairs`.
    """
    workload = np.zeros(pairs.shape[1])
    for i in range(len(experts)):
        key = first + experts[i]
        times = max(1, seen[key])
        for e in range(len(workload)):
            workload[e] += tokens[i] * (pairs[key, e] / times)
    return workload


class Transitions:
    """Counts pairs of experts that served one token in neighbouring layers. L layers, E
    experts of a layer.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.experts = experts
        self.pairs = np.zeros((layers * experts, experts))
        self.seen = np.zeros(layers * experts, np.int64)

    @classmethod
    def known(cls, table: np.ndarray) -> Self:
        """The transitions of a table, float64 [L, E, E]; they are not counted on."""
        transitions = cls(len(table), table.shape[1])
        transitions.pairs[:] = table.reshape(transitions.pairs.shape)
        return transitions

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
        count_pairs(
            self.pairs,
            self.seen,
            layer * self.experts,
            np.ascontiguousarray(before, np.uint16),
            np.ascontiguousarray(after, np.uint16),
        )

    def workload(
        self, layer: int, experts: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:
        """Predict the workload of the layer behind `layer`, float64 [E], by the active
        experts of `layer` and their tokens.
        """
        return following_workload(
            self.pairs,
            self.seen,
            layer * self.experts,
            np.ascontiguousarray(experts, np.int32),
            np.ascontiguousarray(tokens, np.int32),
        )

    def table(self) -> np.ndarray:
        """The full table: float64 [L, E, E]."""
        # At least 1, so that rows that were never seen stay 0.
        seen = np.maximum(self.seen, 1)
        return (self.pairs / seen[:, None]).reshape(-1, self.experts, self.experts)


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

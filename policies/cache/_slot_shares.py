"""Which layer needs how much of the cache: AdapMoE's division of slots by the misses
that each layer would have.

A layer whose experts are foreseen well, or that often gets by with one expert, needs
few slots. The expected misses of a token fall with every slot a layer gets, so a table
from layer to layer finds the division with the fewest.

L MoE layers, N experts of a layer, K of them per token.
"""

from __future__ import annotations

import numpy as np
from moesim.policies.base import PolicyError


def expected_misses(
    slots: np.ndarray, experts: int, top_k: int, single: float, accuracy: float
) -> np.ndarray:
    """Misses of one token in a layer, float64, same shape as `slots`, if all sets of K
    experts are equally likely.

    A token misses ``K (N - s) / N`` experts in the mean, less the one that was
    prefetched if it misses any.

    Args:
        slots: s, of the layer, 0 to `experts`.
        experts: N.
        top_k: K.
        single: share of tokens for which adaptive gating keeps one expert.
        accuracy: share of tokens for which the one prefetched expert is right.

    Source: AdapMoE's code, algorithms §6.8, written there for K = 2 and N = 8: ``2 m0 +
    m1`` is the mean, ``m0 + m1`` the chance to miss any.
    """
    cached = np.asarray(slots, np.float64)
    absent = 1.0 - cached / experts
    spared = np.prod(
        [np.maximum(cached - i, 0.0) / (experts - i) for i in range(top_k)], axis=0
    )
    alone = single * absent * (1.0 - accuracy)
    result: np.ndarray = alone + (1.0 - single) * (
        top_k * absent - accuracy * (1.0 - spared)
    )
    return result


def kept_alone(weights: np.ndarray, threshold: float) -> float:
    """Share of tokens whose other experts all have less than `threshold` of the weight;
    `weights` is [T, K].
    """
    shares = weights.astype(np.float64) / np.maximum(
        weights.sum(axis=1, keepdims=True, dtype=np.float64), 1e-30
    )
    return float((shares[:, 1:] < threshold).all(axis=1).mean()) if len(shares) else 0.0


def divided(
    total: int, experts: int, top_k: int, single: np.ndarray, accuracy: np.ndarray
) -> np.ndarray:
    """Divide `total` slots so that all layers together miss least, at least one each:
    int64 [L].

    Equal divisions go to the one that gives the later layers less.

    Args:
        total: slots, L to L N.
        experts: N.
        top_k: K.
        single: float [L], and
        accuracy: float [L], as in `expected_misses`.

    Raises:
        PolicyError: shapes differ, shares are not between 0 and 1, or the slots do not
            go round.
    """
    single = np.asarray(single, np.float64)
    accuracy = np.asarray(accuracy, np.float64)
    layers = len(single)
    shares = np.concatenate((single, accuracy))
    if single.shape != accuracy.shape or not ((shares >= 0.0) & (shares <= 1.0)).all():
        raise PolicyError(
            "division of slots: expected two shares between 0 and 1 for every layer,"
            f" got shapes {single.shape} and {accuracy.shape}, values"
            f" {shares.min(initial=0.0):g} to {shares.max(initial=0.0):g}"
        )
    if not layers <= total <= layers * experts:
        raise PolicyError(
            f"division of slots: expected {layers} to {layers * experts} slots, got"
            f" {total}"
        )
    least = np.full(total + 1, np.inf)
    least[0] = 0.0
    choice = np.zeros((layers, total + 1), np.int64)
    for layer in range(layers):
        found = np.full(total + 1, np.inf)
        for slots in range(1, min(experts, total) + 1):
            cost = float(
                expected_misses(
                    np.array(slots), experts, top_k, single[layer], accuracy[layer]
                )
            )
            better = least[: total + 1 - slots] + cost < found[slots:] - 1e-12
            found[slots:] = np.where(
                better, least[: total + 1 - slots] + cost, found[slots:]
            )
            choice[layer, slots:] = np.where(better, slots, choice[layer, slots:])
        least = found
    given = np.empty(layers, np.int64)
    left = total
    for layer in range(layers - 1, -1, -1):
        given[layer] = choice[layer, left]
        left -= given[layer]
    return given

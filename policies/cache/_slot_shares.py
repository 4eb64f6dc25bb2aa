"""Divisions of cache slots among layers: AdapMoE's, by the misses that each would have,
and Fate's, first layers first.

A layer whose experts are predicted well, or that often gets by with one expert, needs
few slots. The expected misses of a token fall with every slot a layer gets. A dynamic
program over the layers finds the division with the fewest.

L MoE layers, N experts of a layer, K of them per token.
"""

from __future__ import annotations

import numpy as np

from moesim.policies.base import PolicyError

# A division must beat another by more than rounding to replace it.
_TOLERANCE = 1e-12

# Keeps the division by a token's weights, which may all be 0, harmless.
_SMALLEST = 1e-30


def expected_misses(
    slots: np.ndarray,
    experts: int,
    top_k: int,
    single: float,
    accuracy: float,
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

    Source: AdapMoE's code, dynamic programming over slots, written there for K = 2 and
    N = 8: ``2 m0 + m1`` is the mean, ``m0 + m1`` the chance to miss any.
    """
    cached = np.asarray(slots, np.float64)
    absent = 1.0 - cached / experts

    # Chance that all K are cached: drawn one by one, without replacement.
    draws = [
        np.maximum(cached - drawn, 0.0) / (experts - drawn) for drawn in range(top_k)
    ]
    all_cached = np.prod(draws, axis=0)

    of_one = single * absent * (1.0 - accuracy)
    of_all = top_k * absent - accuracy * (1.0 - all_cached)
    result: np.ndarray = of_one + (1.0 - single) * of_all
    return result


def kept_alone(
    weights: np.ndarray,
    threshold: float,
) -> float:
    """Share of tokens whose other experts all have less than `threshold` of the weight;
    `weights` is [T, K].
    """
    total = weights.sum(axis=1, keepdims=True, dtype=np.float64)
    shares = weights.astype(np.float64) / np.maximum(total, _SMALLEST)
    if not len(shares):
        return 0.0
    alone = (shares[:, 1:] < threshold).all(axis=1)
    return float(alone.mean())


def divided(
    total: int,
    experts: int,
    top_k: int,
    single: np.ndarray,
    accuracy: np.ndarray,
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
        PolicyError: shapes differ, shares are not between 0 and 1, or there are too few
            or too many slots.
    """
    single = np.asarray(single, np.float64)
    accuracy = np.asarray(accuracy, np.float64)
    layers = len(single)
    shares = np.concatenate((single, accuracy))
    are_shares = ((shares >= 0.0) & (shares <= 1.0)).all()
    if single.shape != accuracy.shape or not are_shares:
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

    # Entry n: least misses of the layers so far with n slots in all.
    least = np.full(total + 1, np.inf)
    least[0] = 0.0
    choice = np.zeros((layers, total + 1), np.int64)
    for layer in range(layers):
        extended = np.full(total + 1, np.inf)
        for slots in range(1, min(experts, total) + 1):
            misses = expected_misses(
                np.array(slots),
                experts,
                top_k,
                single[layer],
                accuracy[layer],
            )
            # With `slots` for this layer, the layers before had that many fewer.
            candidate = least[: total + 1 - slots] + float(misses)
            better = candidate < extended[slots:] - _TOLERANCE
            extended[slots:] = np.where(better, candidate, extended[slots:])
            choice[layer, slots:] = np.where(better, slots, choice[layer, slots:])
        least = extended

    division = np.empty(layers, np.int64)
    left = total
    for layer in range(layers - 1, -1, -1):
        division[layer] = choice[layer, left]
        left -= division[layer]
    return division


def front_first(total: int, layers: int, experts: int, whole_layers: int) -> np.ndarray:
    """Give the first layers all their experts, as far as `total` slots go, and what is
    left to the others alike: int64 [layers].

    Args:
        whole_layers: those that come first.

    Source: Fate (arXiv 2502.12224), shallow-favoring expert cache;
    `utils/memory_cost.py` of FFFzy/Fate_open, which has 4 for Qwen1.5-MoE.
    """
    layer = np.arange(layers)
    division = np.clip(total - layer * experts, 0, experts)
    others = layers - whole_layers
    if others > 0:
        left = max(0, total - whole_layers * experts)
        shares = left // others + (layer[whole_layers:] - whole_layers < left % others)
        division[whole_layers:] = np.minimum(shares, experts)
    return division.astype(np.int64)

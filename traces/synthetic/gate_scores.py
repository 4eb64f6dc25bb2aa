"""Draws gate logits for a trace that has none, consistent with its experts and weights.

Model, per token and layer: every expert gets a key, ``probit(share of tokens that chose
it) + x``, with x a standard normal that remembers ``TOKEN_MEMORY`` of its value at the
token before. The K largest keys become the logits of the recorded experts, best first;
the others keep their order among themselves. Recorded weights replace the gaps between
the K: softmax over them gives the weights back. So popular experts are near misses more
often than others, as behind a real gate, and no unused expert has a higher score than a
used one.

Letters: N rows, E experts, K per token, L layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.special import expit, logit, ndtri, softmax

if TYPE_CHECKING:
    from moesim.traces.format.schema import ModelShape

# Of a logit's deviation from its mean, between adjacent tokens: 0.34 in `tiny`.
TOKEN_MEMORY = 0.35
# A choice more or less of an expert that nobody or everybody chose.
_PRIOR = 0.5
# Least difference between the last used expert and the best unused one. Larger than
# half a step of float16, so that rounding cannot make them equal.
_MARGIN = 0.002
# Smallest float16: scores that were rounded to zero are at most that.
SMALLEST = 2.0**-24
# Scores of sigmoid gates stay below one, where a logit would be infinite.
_MOST_SIGMOID = 0.9995
_BISECTIONS = 24


def is_sigmoid(shape: ModelShape) -> bool:
    """Return whether scores are sigmoids of logits; others are their softmax."""
    return shape.scoring.startswith("sigmoid")


def logits_of(scores: np.ndarray, *, sigmoid: bool) -> np.ndarray:
    """Undo the gate's scoring: float32 logits, up to a constant per row for softmax."""
    # float64 would only make room for digits that float16 never had.
    clipped = np.maximum(scores.astype(np.float32), np.float32(SMALLEST))
    if not sigmoid:
        return centred(np.log(clipped))

    clipped = np.minimum(clipped, np.float32(1 - 2.0**-12))
    return np.log(clipped / (1 - clipped))


def centred(logits: np.ndarray) -> np.ndarray:
    """Return rows with a mean of zero: a softmax does not know the difference."""
    return np.asarray(logits - logits.mean(axis=1, keepdims=True), np.float32)


def popularity_logits(counts: np.ndarray, top_k: int) -> np.ndarray:
    """Return the mean key of every expert, float32 [L, E], from how many tokens chose
    it, int [L, E].
    """
    # Every layer counts by itself: the last one of a ragged prefill has fewer tokens.
    chosen = counts.sum(axis=1, keepdims=True)
    experts = counts.shape[1]
    share = top_k * (counts + _PRIOR) / (chosen + _PRIOR * experts)
    # An expert that every token chose, or none, would be infinitely far away.
    probit = ndtri(np.clip(share, 1e-3, 1 - 1e-3))
    return centred(probit)


def scores_of(logits: np.ndarray, *, sigmoid: bool) -> np.ndarray:
    """Return the gate's scores of logits [..., E]: float32."""
    exact = logits.astype(np.float64)
    scores = expit(exact) if sigmoid else softmax(exact, axis=-1)
    return np.asarray(scores, np.float32)


def logits_behind(
    keys: np.ndarray,
    experts: np.ndarray,
    weights: np.ndarray | None,
    *,
    renormalised: bool,
    sigmoid: bool,
) -> np.ndarray:
    """Return logits from keys [N, E] and the recorded experts: float32 [N, E],
    log-scores up to a constant where scores are a softmax.

    Args:
        keys: as the module says.
        experts: [N, K], best first.
        weights: [N, K] combine weights; None where the trace has none.
        renormalised: whether the gate rescales the weights of the K to a sum of one.
        sigmoid: whether scores are sigmoids, not a softmax.
    """
    top_k = experts.shape[1]
    order = np.argsort(-keys, axis=1, kind="stable")
    descending = np.take_along_axis(keys, order, axis=1).astype(np.float64)
    chosen, rest = np.split(descending, [top_k], axis=1)
    mass = np.ones(len(keys))
    if weights is not None:
        mass = weights.sum(axis=1, dtype=np.float64)
        chosen = _logits_of_weights(
            weights.astype(np.float64),
            chosen[:, -1:],
            are_scores=(mass < (top_k if sigmoid else 1))[:, None] & (not renormalised),
            sigmoid=sigmoid,
        )

    logits = np.empty(keys.shape, np.float32)
    used = np.zeros(keys.shape, bool)
    np.put_along_axis(logits, experts.astype(np.intp), chosen, axis=1)
    np.put_along_axis(used, experts.astype(np.intp), values=True, axis=1)
    if not rest.size:
        return logits

    # The others, by descending key, take the keys that are left.
    rest = rest - rest[:, :1]
    highest = chosen.min(axis=1) - _MARGIN
    start = np.minimum(descending[:, top_k], highest)
    pull = np.ones(len(keys))
    if not (sigmoid or renormalised):
        some = mass < 1
        start[some], pull[some] = _fitting(rest[some], 1 - mass[some], highest[some])
    others = order[~np.take_along_axis(used, order, axis=1)].reshape(rest.shape)
    values = start[:, None] + pull[:, None] * rest
    np.put_along_axis(logits, others, values, axis=1)
    return logits


def _logits_of_weights(
    weights: np.ndarray, last_key: np.ndarray, *, are_scores: np.ndarray, sigmoid: bool
) -> np.ndarray:
    """Logits [N, K] of the used experts from their weights [N, K].

    Weights that were rescaled tell ratios only; then the least of them gets `last_key`
    [N, 1]. Scaled by a constant, they may exceed what scores can add up to.
    """
    weights = np.maximum(weights, SMALLEST)
    smallest = weights.min(axis=1, keepdims=True)
    if not sigmoid:
        return np.where(
            are_scores, np.log(weights), last_key + np.log(weights / smallest)
        )

    # Ratios are kept as long as the largest score stays below one.
    largest = weights.max(axis=1, keepdims=True)
    factor = np.minimum(expit(last_key) / smallest, _MOST_SIGMOID / largest)
    scores = weights * np.where(are_scores, 1.0, factor)
    return np.asarray(logit(np.minimum(scores, _MOST_SIGMOID)))


def _fitting(
    rest: np.ndarray, mass: np.ndarray, highest: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The logit of the first unused expert [N], and the factor of the others' distances
    to it [N, E - K], for scores of all unused experts that add up to `mass`; none is
    above `highest`.
    """
    start = np.log(mass / np.exp(rest).sum(axis=1))
    # Flattened until the mass fits below the least used expert.
    low = np.zeros(len(rest))
    high = np.ones(len(rest))
    for _ in range(_BISECTIONS):
        pull = (low + high) / 2
        total = np.exp(highest[:, None] + pull[:, None] * rest).sum(axis=1)
        low = np.where(total < mass, low, pull)
        high = np.where(total < mass, pull, high)
    fits = start <= highest
    return np.where(fits, start, highest), np.where(fits, 1.0, low)

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

import math
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtri


if TYPE_CHECKING:
    from moesim.traces.format.schema import ModelShape

# Of a logit's deviation from its mean, between adjacent tokens: 0.34 in `tiny`.
TOKEN_MEMORY = 0.35
# Least difference between the last used expert and the best unused one. Larger than
# half a step of float16, so that rounding cannot make them equal.
MARGIN = 0.002
# Smallest float16: scores that were rounded to zero are at most that.
SMALLEST = 2.0**-24
# A choice more or less of an expert that nobody or everybody chose.
_PRIOR = 0.5
_BISECTIONS = 24
# Scores of sigmoid gates stay below one, where a logit would be infinite.
_MOST_SIGMOID = 0.9995



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


def _weights_to_logits(
    weights: np.ndarray,
    last_key: float,
    renormalised: bool,
    sigmoid: bool,
    logits: np.ndarray,
) -> None:
    """Fill `logits` [K] of the used experts from their weights [K].

    Weights that were rescaled tell ratios only; then the least of them gets `last_key`.
    """
    mass = 0.0
    smallest = np.inf
    largest = 0.0
    for weight in weights:
        mass += weight
        smallest = min(smallest, max(weight, SMALLEST))
        largest = max(largest, weight)
    # Scaled by a constant, weights may exceed what scores can add up to.
    most_mass = len(weights) if sigmoid else 1
    are_scores = not renormalised and mass < most_mass

    factor = 1.0
    if sigmoid and not are_scores:
        least_score = 1 / (1 + math.exp(-last_key))
        # Ratios are kept as long as the largest score stays below one.
        factor = min(least_score / smallest, _MOST_SIGMOID / largest)

    for place in range(len(weights)):
        weight = max(weights[place], SMALLEST)
        if sigmoid:
            score = min(weight * factor, _MOST_SIGMOID)
            logits[place] = math.log(score / (1 - score))
        elif are_scores:
            logits[place] = math.log(weight)
        else:
            logits[place] = last_key + math.log(weight / smallest)


def _fitting_mass(rest: np.ndarray, mass: float, highest: float) -> tuple[float, float]:
    """The logit of the first unused expert, and the factor of the others' distances to
    it, for scores of all unused experts that add up to `mass`; none is above `highest`.
    """
    total = 0.0
    for value in rest:
        total += math.exp(value - rest[0])
    start = math.log(mass / total)
    if start <= highest:
        return start, 1.0

    # Flattened until the mass fits below the least used expert.
    low = 0.0
    high = 1.0
    for _ in range(_BISECTIONS):
        pull = (low + high) / 2
        total = 0.0
        for value in rest:
            total += math.exp(highest + pull * (value - rest[0]))
        if total < mass:
            high = pull
        else:
            low = pull
    return highest, low


def fill_logits(
    keys: np.ndarray,
    experts: np.ndarray,
    weights: np.ndarray,
    renormalised: bool,
    sigmoid: bool,
    logits: np.ndarray,
) -> None:
    """Fill `logits` [N, E] from keys [N, E] and the recorded experts [N, K].

    Args:
        keys: as the module says.
        experts: best first.
        weights: [N, K] combine weights; [0, K] where the trace has none.
        renormalised: whether the gate rescales the weights of the K to a sum of one.
        sigmoid: whether scores are sigmoids, not a softmax.
        logits: filled; log-scores up to a constant where scores are a softmax.
    """
    rows, width = keys.shape
    top_k = experts.shape[1]
    chosen = np.empty(top_k, np.float64)

    for row in range(rows):
        order = np.argsort(-keys[row])
        mass = 1.0
        for place in range(top_k):
            chosen[place] = keys[row, order[place]]
        if len(weights):
            mass = float(weights[row].sum())
            last_key = chosen[top_k - 1]
            _weights_to_logits(weights[row], last_key, renormalised, sigmoid, chosen)

        used = np.zeros(width, np.bool_)
        for place in range(top_k):
            used[experts[row, place]] = True
            logits[row, experts[row, place]] = chosen[place]
        if top_k == width:
            continue

        # The others, by descending key, take the keys that are left.
        rest = keys[row][order[top_k:]].astype(np.float64)
        highest = chosen.min() - MARGIN
        start = min(rest[0], highest)
        pull = 1.0
        if not (sigmoid or renormalised) and mass < 1:
            start, pull = _fitting_mass(rest, 1 - mass, highest)

        count = 0
        for expert in order:
            if not used[expert]:
                logits[row, expert] = start + pull * (rest[count] - rest[0])
                count += 1


def fill_scores(logits: np.ndarray, sigmoid: bool, scores: np.ndarray) -> None:
    """Fill `scores` [N, E] with the softmax, or sigmoids, of `logits` [N, E]."""
    rows, width = logits.shape
    for row in range(rows):
        # Row by row, so that no result depends on how many rows a call holds.
        largest = -np.inf
        for expert in range(width):
            largest = max(largest, logits[row, expert])

        total = 0.0
        for expert in range(width):
            if sigmoid:
                scores[row, expert] = 1 / (1 + math.exp(-logits[row, expert]))
            else:
                power = math.exp(logits[row, expert] - largest)
                scores[row, expert] = power
                total += power
        if not sigmoid:
            for expert in range(width):
                scores[row, expert] /= total

"""The loops behind synthetic gates and predictions, with C types.

Letters: N rows, E experts, K per token, L layers, T tokens, G = T * L places.
"""

from __future__ import annotations

import math
from math import inf

import numpy as np

# Least difference between the last used expert and the best unused one. Larger than
# half a step of float16, so that rounding cannot make them equal.
MARGIN = 0.002
# Smallest float16: scores that were rounded to zero are at most that.
SMALLEST = 2.0**-24
_BISECTIONS = 24
# Scores of sigmoid gates stay below one, where a logit would be infinite.
_MOST_SIGMOID = 0.9995


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
    smallest_score = SMALLEST
    most_sigmoid = _MOST_SIGMOID
    mass = 0.0
    smallest = inf
    largest = 0.0
    for place in range(len(weights)):
        weight = float(weights[place])
        mass += weight
        smallest = min(smallest, max(weight, smallest_score))
        largest = max(largest, weight)
    # Scaled by a constant, weights may exceed what scores can add up to.
    most_mass = len(weights) if sigmoid else 1
    are_scores = not renormalised and mass < most_mass

    factor = 1.0
    if sigmoid and not are_scores:
        least_score = 1 / (1 + math.exp(-last_key))
        factor = least_score / smallest
        # Ratios are kept as long as the largest score stays below one.
        if largest > 0:
            factor = min(factor, most_sigmoid / largest)

    for place in range(len(weights)):
        weight = max(float(weights[place]), smallest_score)
        if sigmoid:
            score = min(weight * factor, most_sigmoid)
            logits[place] = math.log(score / (1 - score))
        elif are_scores:
            logits[place] = math.log(weight)
        else:
            logits[place] = last_key + math.log(weight / smallest)


def _fitting_mass(
    rest: np.ndarray, mass: float, highest: float, fitted: np.ndarray
) -> None:
    """Fill `fitted` with the logit of the first unused expert, and the factor of the
    others' distances to it, for scores of all unused experts that add up to `mass`;
    none is above `highest`.
    """
    total = 0.0
    for n in range(len(rest)):
        total += math.exp(rest[n] - rest[0])
    fitted[0] = math.log(mass / total)
    fitted[1] = 1.0
    if fitted[0] <= highest:
        return

    # Flattened until the mass fits below the least used expert.
    low = 0.0
    high = 1.0
    for _ in range(_BISECTIONS):
        pull = (low + high) / 2
        total = 0.0
        for n in range(len(rest)):
            total += math.exp(highest + pull * (rest[n] - rest[0]))
        if total < mass:
            high = pull
        else:
            low = pull
    fitted[0] = highest
    fitted[1] = low


def fill_ordered(  # noqa: C901 - one loop, compiled
    keys: np.ndarray,
    order: np.ndarray,
    experts: np.ndarray,
    weights: np.ndarray,
    renormalised: bool,
    sigmoid: bool,
    logits: np.ndarray,
) -> None:
    """Fill `logits` as `moesim.traces.synthetic.gate_scores.fill_logits` does; `order`
    int64 [N, E], each row's experts by falling key.
    """
    width = keys.shape[1]
    top_k = experts.shape[1]
    chosen = np.empty(top_k)
    rest = np.empty(width - top_k)
    fitted = np.empty(2)
    used = np.zeros(width, np.uint8)
    margin = MARGIN

    for row in range(len(keys)):
        mass = 1.0
        for place in range(top_k):
            chosen[place] = keys[row, order[row, place]]
        if len(weights):
            total = np.float32(0)
            for place in range(top_k):
                total += weights[row, place]
            mass = float(total)
            last_key = chosen[top_k - 1]
            _weights_to_logits(weights[row], last_key, renormalised, sigmoid, chosen)

        for expert in range(width):
            used[expert] = False
        for place in range(top_k):
            used[experts[row, place]] = True
            logits[row, experts[row, place]] = chosen[place]
        if top_k == width:
            continue

        # The others, by descending key, take the keys that are left.
        for place in range(top_k, width):
            rest[place - top_k] = keys[row, order[row, place]]
        highest = chosen[0]
        for place in range(1, top_k):
            highest = min(highest, chosen[place])
        highest -= margin
        start = min(rest[0], highest)
        pull = 1.0
        if not (sigmoid or renormalised) and mass < 1:
            _fitting_mass(rest, 1 - mass, highest, fitted)
            start = fitted[0]
            pull = fitted[1]

        count = 0
        for place in range(width):
            expert = order[row, place]
            if not used[expert]:
                logits[row, expert] = start + pull * (rest[count] - rest[0])
                count += 1


def fill_scores(logits: np.ndarray, sigmoid: bool, scores: np.ndarray) -> None:
    """Fill `scores` [N, E] with the softmax, or sigmoids, of `logits` [N, E]."""
    width = logits.shape[1]
    for row in range(len(logits)):
        # Row by row, so that no result depends on how many rows a call holds.
        largest = -inf
        for expert in range(width):
            largest = max(largest, float(logits[row, expert]))

        total = 0.0
        for expert in range(width):
            logit = float(logits[row, expert])
            if sigmoid:
                scores[row, expert] = 1 / (1 + math.exp(-logit))
            else:
                power = math.exp(logit - largest)
                scores[row, expert] = power
                total += power
        if not sigmoid:
            for expert in range(width):
                scores[row, expert] = float(scores[row, expert]) / total


def add_moments(logits: np.ndarray, sums: np.ndarray, counts: np.ndarray) -> None:
    """Add logits [G, E] and their squares to `sums` [2, L, E], rows to `counts` [L].

    One row after the other, so that the sums are the same for any size of chunks.
    """
    layers = len(counts)
    for row in range(len(logits)):
        if math.isnan(logits[row, 0]):
            continue
        layer = row % layers
        counts[layer] += 1
        for expert in range(logits.shape[1]):
            value = float(logits[row, expert])
            sums[0, layer, expert] += value
            sums[1, layer, expert] += value * value


def remember(values: np.ndarray, last: np.ndarray, memory: float, begun: bool) -> None:
    """Turn independent normals [T, W] into a walk that goes on from `last` [W]."""
    keep = np.float32(memory)
    fresh = np.float32(math.sqrt(1 - memory * memory))
    for token in range(len(values)):
        for place in range(values.shape[1]):
            # The first token has no past, and unit variance all the same.
            if begun or token:
                moved = keep * last[place] + fresh * values[token, place]
                values[token, place] = moved
            last[place] = values[token, place]


def fill_predicted(
    logits: np.ndarray,
    means: np.ndarray,
    noise: np.ndarray,
    difficulty: np.ndarray,
    spread: np.ndarray,
    fidelity: float,
    predicted: np.ndarray,
) -> None:
    """Fill `predicted` [N, E] with logits between the true ones and mere noise.

    A logit's deviation from its layer's mean is mixed with noise of the same variance,
    so that a predictor has favourites and a spread like those of the gate itself.

    Args:
        logits: [N, E] true ones, where rows repeat through the layers; a row of NaN
            stands for a gate output that was not recorded.
        means: [L, E] of the logits.
        noise: [N, E] of unit variance.
        difficulty: [N] factors of the noise.
        spread: [L] standard deviation of logits around their mean.
        fidelity: correlation with the true deviation at a difficulty of 1, 0..1.
        predicted: filled.
    """
    width = logits.shape[1]
    layers = len(means)
    for row in range(len(logits)):
        layer = row % layers
        # Noise over signal; without signal nothing else is left.
        kept = 0.0
        added = 1.0
        if fidelity > 0:
            ratio = math.sqrt(1 - fidelity * fidelity) / fidelity
            ratio *= float(difficulty[row])
            kept = 1 / math.sqrt(1 + ratio * ratio)
            added = ratio * kept
        known = not math.isnan(logits[row, 0])
        if not known:
            added = 1.0

        for expert in range(width):
            mean = means[layer, expert]
            size = added * float(spread[layer])
            value = float(mean) + size * float(noise[row, expert])
            if known:
                deviation = logits[row, expert] - mean
                value += kept * float(deviation)
            predicted[row, expert] = value

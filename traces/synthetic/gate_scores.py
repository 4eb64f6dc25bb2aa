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
from scipy.special import ndtri

from moesim.traces.synthetic.loops import SMALLEST, fill_ordered

if TYPE_CHECKING:
    from moesim.traces.format.schema import ModelShape

# Of a logit's deviation from its mean, between adjacent tokens: 0.34 in `tiny`.
TOKEN_MEMORY = 0.35
# A choice more or less of an expert that nobody or everybody chose.
_PRIOR = 0.5


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
    order = np.argsort(-keys, axis=1, kind="stable")
    fill_ordered(keys, order, experts, weights, renormalised, sigmoid, logits)

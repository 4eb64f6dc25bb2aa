"""How similar are prompt and answer, one layer and the next, one token and the tokens
around it?

Everything here is about single sequences, so a batch changes nothing. L layers, E
experts, K per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.schema import Phase
from moesim.traces.stats.counting_kernels import count_pairs, count_segments

if TYPE_CHECKING:
    from moesim.traces.format.reader import SequenceRows
    from moesim.traces.format.schema import ModelShape

SEGMENTS_TOKENS = (4, 16, 64, 256)


def daop_similarity(prefill: np.ndarray, decode: np.ndarray) -> float:
    """Return the mean over layers of the cosine between loads in prefill and in decode,
    each [L, E] of counts or shares.

    Source: DAOP (arXiv 2501.10375), equation 1; a cosine does not see the scale, so
    counts serve as well.
    """
    return float(np.mean(cosines(prefill, decode)))


def cosines(prefill: np.ndarray, decode: np.ndarray) -> np.ndarray:
    """Return the cosines of `daop_similarity`: float64 [L], 0 where a layer is
    empty.
    """
    lengths = np.linalg.norm(prefill, axis=1) * np.linalg.norm(decode, axis=1)
    products = (prefill * decode).sum(axis=1)
    return np.asarray(products / np.where(lengths > 0, lengths, 1.0))


def mutual_information_bits(joint: np.ndarray) -> float:
    """Return the plug-in mutual information in bits of a table of counts [E, E]; never
    negative, 0 if independent.
    """
    share = joint / max(joint.sum(), 1)
    independent = share.sum(axis=1, keepdims=True) * share.sum(axis=0, keepdims=True)

    # An empty cell adds nothing; its logarithm would be infinite.
    seen = share > 0
    bits = share[seen] * np.log2(share[seen] / independent[seen])
    # Rounding may leave a sum just below 0.
    return max(0.0, float(bits.sum()))


def information_bias_bits(tokens: int, experts: int, top_k: int) -> float:
    """Return what independent layers would seem to share: ``((E - K) / K)² / (2 N ln
    2)`` bits for N independent tokens.

    The first-order bias of `mutual_information_bits` where each token adds its K x K
    pairs: every pair of experts adds the variance of a draw without replacement, ``π (1
    - π)`` with ``Σ π = K``; K = 1 is Miller and Madow's (1955). Tokens that resemble
    each other count for fewer than N, so the true bias is larger.
    """
    degrees = ((experts - top_k) / top_k) ** 2
    return degrees / (2 * max(tokens, 1) * float(np.log(2)))


class SimilarityAggregator:
    """Takes sequences one by one; memory is that of the tables, chiefly int64 [L - 1,
    E, E].
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        layers = shape.layers
        experts = shape.experts
        top_k = shape.top_k
        segments = len(SEGMENTS_TOKENS)

        self._tokens = 0
        self._joint = np.zeros((layers - 1, experts, experts), np.int64)

        self._lengths = np.array(SEGMENTS_TOKENS, np.int64)
        self._covered = np.zeros((segments, layers, top_k), np.int64)
        self._segments = np.zeros((segments, layers), np.int64)

        # Sequences that have both a prompt and an answer, and their cosines' sums.
        self._compared = 0
        self._cosines = np.zeros(layers)

    def add(self, rows: SequenceRows) -> None:
        """Take one sequence."""
        layers = self.shape.layers
        experts = self.shape.experts
        prompt = int(np.count_nonzero(rows.phase == Phase.PREFILL))

        generated = np.ascontiguousarray(rows.experts[prompt:])
        decode = generated.reshape(-1, layers, self.shape.top_k)
        if not len(decode):
            return

        self._tokens += len(decode)
        count_pairs(decode, self._joint)
        count_segments(decode, experts, self._lengths, self._covered, self._segments)

        # A sequence without a prompt has nothing to compare with.
        if prompt:
            key = rows.layer.astype(np.int64)[:, None] * experts + rows.experts
            prefill_load = self._load(key[:prompt])
            decode_load = self._load(key[prompt:])
            self._cosines += cosines(prefill_load, decode_load)
            self._compared += 1

    def _load(self, key: np.ndarray) -> np.ndarray:
        """Choices by layer and expert, [L, E]."""
        layers = self.shape.layers
        counts = np.bincount(key.reshape(-1), minlength=layers * self.shape.experts)
        return counts.reshape(layers, -1)

    def figures(self) -> dict[str, Any]:
        """Return the figures of `moesim.traces.stats.trace_summary.summarise_trace`
        that come from here; None where the trace has nothing to say.
        """
        shape = self.shape
        similarity = self._cosines / self._compared if self._compared else None
        information = None
        if self._tokens:
            information = [mutual_information_bits(table) for table in self._joint]

        return {
            "similarity": None if similarity is None else float(similarity.mean()),
            "similarity_by_layer": None if similarity is None else similarity.tolist(),
            "information_bits": information,
            "information_bias_bits": information_bias_bits(
                self._tokens, shape.experts, shape.top_k
            ),
            "consistency": self._consistency(),
        }

    def _consistency(self) -> dict[str, list[float] | None]:
        """Segment tokens -> share of choices that the best K experts served, [L]."""
        consistency: dict[str, list[float] | None] = {}
        for s, length in enumerate(SEGMENTS_TOKENS):
            choices = self._segments[s] * length * self.shape.top_k
            # No sequence may be as long as a segment.
            known = self._segments[s].all()
            best = self._covered[s, :, -1]
            consistency[str(length)] = (best / choices).tolist() if known else None

        return consistency

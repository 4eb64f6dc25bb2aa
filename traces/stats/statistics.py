"""Statistics of a trace before any machine is involved: how many experts work, how
evenly, and how long they stay in use.

All figures are per layer and about decode, one sequence at a time, unless they say
otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.layer_steps import layer_steps
from moesim.traces.format.schema import Phase
from moesim.traces.stats.loops import (
    WINDOWS,
    count_decode,
    count_pairs,
    count_segments,
)

if TYPE_CHECKING:
    from moesim.traces.format.layer_steps import LayerSteps
    from moesim.traces.format.reader import SequenceRows, Trace
    from moesim.traces.format.schema import ModelShape

CACHE_RATIOS = (0.125, 0.25, 0.5, 0.75)
WINDOW_STEPS = 32


def info(trace: Trace) -> dict[str, Any]:
    """Read all rows once and return what the file holds.

    Returns:
        path, size_bytes, rows, columns, split, provenance, shape (as words), sequences,
        tokens by phase.

    Raises:
        TraceError: the trace is damaged.
    """
    shape = trace.shape
    tokens = {phase.label: 0 for phase in Phase}
    sequences = 0
    for rows in trace.sequences():
        sequences += 1
        # A ragged prefill has fewer rows than tokens times layers.
        begins = np.concatenate(([True], np.diff(rows.pos) != 0))
        for phase in Phase:
            tokens[phase.label] += int(np.count_nonzero(begins & (rows.phase == phase)))

    return {
        "path": trace.name,
        "size_bytes": trace.size_bytes,
        "rows": trace.rows,
        "columns": sorted(trace.columns),
        "split": trace.header.split,
        "provenance": trace.header.provenance,
        "model": shape.name,
        "layers": shape.layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "expert_bytes": list(shape.expert_sizes),
        "assumed": list(shape.assumed),
        "sequences": sequences,
        "prefill_tokens": tokens["prefill"],
        "decode_tokens": tokens["decode"],
    }


def stats(trace: Trace, *, batch: int = 1) -> dict[str, Any]:
    """Characterise the routing. L layers, E experts, K experts per token.

    Args:
        trace: an opened trace.
        batch: sequences that run together; changes active experts, overlap and all that
            follows.

    Returns:
        ``prefill_tokens``, ``decode_tokens``, ``decode_steps``; ``overlap_chance``, the
        overlap that independent uniform choices would have, K/E; and lists of L
        numbers, null where the trace has no decode:

        - ``active``: mean active experts per decode step; ``active_prefill``: the same
            per prefill step;
        - ``entropy_bits``: of the load over experts, log2 E if even; ``max_share``:
            load of the busiest expert;
        - ``overlap``: mean share of a step's active experts that were active in the
            step before, within one batch;
        - ``working_set``: mean distinct experts in windows of 32 decode steps;
            ``touched``: distinct experts at all;
        - ``lru``: cache ratio -> hit rate of an LRU cache of ``round(ratio * E)``
            slots, looked up before the step.
    """
    aggregator = LayerAggregator(trace.shape)
    for block in layer_steps(trace, batch=batch):
        aggregator.add(block)

    return summary(aggregator, trace.shape, batch)


def summary(
    aggregator: LayerAggregator, shape: ModelShape, batch: int
) -> dict[str, Any]:
    """Return the figures of `stats`, of an aggregator that has seen the whole trace."""
    return {
        "batch": batch,
        "prefill_tokens": aggregator.tokens[Phase.PREFILL],
        "decode_tokens": aggregator.tokens[Phase.DECODE],
        "decode_steps": aggregator.steps[Phase.DECODE],
        "overlap_chance": shape.top_k / shape.experts,
        **aggregator.figures(),
    }


class LayerAggregator:
    """Counts layer steps into tables; memory is that of the tables.

    Attributes:
        steps: forward passes so far, by phase.
        active: phase -> sums of active experts, [L].
        load: int64 [L, E], tokens routed to each expert in decode.
        distances: int64 [L, E + 1], accesses by the number of other experts used since;
            the last: first uses.
    """

    def __init__(self, shape: ModelShape) -> None:
        layers = shape.layers
        experts = shape.experts
        self.steps = {Phase.PREFILL: 0, Phase.DECODE: 0}
        self.active = {phase: np.zeros(layers) for phase in Phase}
        self.load = np.zeros((layers, experts), np.int64)
        self.distances = np.zeros((layers, experts + 1), np.int64)
        self._layers = layers
        self._experts = experts
        self._top_k = shape.top_k
        self._choices = {phase: np.zeros(layers, np.int64) for phase in Phase}

        # What the kernel carries from block to block.
        self._last_use = np.full((layers, experts), -1, np.int64)
        self._last_batch = np.full(layers, -1, np.int64)
        self._overlap = np.zeros(layers)
        self._pairs = np.zeros(layers, np.int64)
        self._fresh = np.zeros((layers, WINDOWS), np.int64)
        self._windows = np.zeros((layers, WINDOWS), np.int64)

    def add(self, block: LayerSteps) -> None:
        """Take a block of layer steps."""
        sizes = np.diff(block.edges)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        for phase in Phase:
            of_phase = block.phase == phase
            self.active[phase] += np.bincount(
                block.layer[of_phase], sizes[of_phase], self._layers
            )
            # Tokens routed, where the line above counts experts.
            accesses = of_phase[owner]
            choices = np.bincount(
                block.layer[owner[accesses]], block.tokens[accesses], self._layers
            )
            self._choices[phase] += choices.astype(np.int64)

        is_decode = block.phase == Phase.DECODE
        begins_step = block.layer == 0
        if is_decode.any():
            self._add_decode(block, is_decode, sizes)
        self.steps[Phase.DECODE] += int((begins_step & is_decode).sum())
        self.steps[Phase.PREFILL] += int((begins_step & ~is_decode).sum())

    def _add_decode(
        self, block: LayerSteps, is_decode: np.ndarray, sizes: np.ndarray
    ) -> None:
        """Count the decode steps of a block; `sizes` [N] are accesses per step."""
        experts = block.experts
        tokens = block.tokens
        edges = block.edges
        if not is_decode.all():
            kept = np.repeat(is_decode, sizes)
            experts = experts[kept]
            tokens = tokens[kept]
            ends = np.cumsum(sizes[is_decode])
            edges = np.concatenate(([0], ends)).astype(np.int64)

        layer = block.layer[is_decode]
        # Decode steps alone: a prompt between them is no step of a window.
        step = self.steps[Phase.DECODE] + np.cumsum(layer == 0) - 1
        count_decode(
            step.astype(np.int64),
            block.batch[is_decode],
            layer,
            edges,
            experts,
            tokens,
            self.load,
            self._last_use,
            self.distances,
            self._last_batch,
            self._overlap,
            self._fresh,
            self._windows,
            self._pairs,
        )

    @property
    def tokens(self) -> dict[Phase, int]:
        """Tokens by phase: those of the fullest layer (a ragged prefill leaves others
        with fewer).
        """
        return {
            phase: int(choices.max()) // self._top_k
            for phase, choices in self._choices.items()
        }

    def figures(self) -> dict[str, Any]:
        """Return the per-layer lists of `stats`."""
        steps = self.steps[Phase.DECODE]
        prefills = self.steps[Phase.PREFILL]
        has_decode = steps > 0

        share = self.load / np.maximum(self.load.sum(axis=1, keepdims=True), 1)
        # The logarithm of 1 stands for that of an expert without load: it adds nothing.
        logarithm = np.log2(np.where(share > 0, share, 1.0))
        entropy = -(share * logarithm).sum(axis=1)

        active = self.active[Phase.DECODE] / max(steps, 1)
        active_prefill = self.active[Phase.PREFILL] / max(prefills, 1)
        # Without a second step in every layer there is nothing to compare.
        has_overlap = self._pairs.all()
        overlap = self._overlap / np.maximum(self._pairs, 1)
        touched = (self.load > 0).sum(axis=1)

        return {
            "active": active.tolist() if has_decode else None,
            "active_prefill": active_prefill.tolist() if prefills else None,
            "entropy_bits": entropy.tolist() if has_decode else None,
            "max_share": share.max(axis=1).tolist() if has_decode else None,
            "overlap": overlap.tolist() if has_overlap else None,
            "working_set": self._working_set(),
            "touched": touched.tolist() if has_decode else None,
            "lru": self._lru_hit_rates(),
        }

    def _lru_hit_rates(self) -> dict[float, list[float] | None]:
        """Cache ratio -> hit rate of each layer, [L]."""
        if not self.steps[Phase.DECODE]:
            return dict.fromkeys(CACHE_RATIOS)

        # An LRU cache of C slots hits what fewer than C others were used since.
        hits = np.cumsum(self.distances, axis=1)
        accesses = np.maximum(hits[:, -1], 1)
        rates: dict[float, list[float] | None] = {}
        for ratio in CACHE_RATIOS:
            slots = round(ratio * self._experts)
            of_ratio = hits[:, slots - 1] if slots else np.zeros(self._layers)
            rates[ratio] = (of_ratio / accesses).tolist()

        return rates

    def _working_set(self) -> list[float] | None:
        sets = self.working_sets().get(WINDOW_STEPS)
        return None if sets is None else sets.tolist()

    def working_sets(self) -> dict[int, np.ndarray]:
        """Return window in decode steps -> mean distinct experts over the whole windows
        that there were, float64 [L].
        """
        steps = self.steps[Phase.DECODE]
        sizes = [1 << w for w in range(self._windows.shape[1]) if steps >> w]
        return {
            size: self._windows[:, w] / (steps // size) for w, size in enumerate(sizes)
        }


# -- similarity ------------------------------------------------------------------------
# How similar are prompt and answer, one layer and the next, one token and the tokens
# around it?
#
# Everything here is about single sequences, so a batch changes nothing. L layers, E
# experts, K per token.


SEGMENTS_TOKENS = (4, 16, 64, 256)


def cosines(prefill: np.ndarray, decode: np.ndarray) -> np.ndarray:
    """Return the cosine of each layer's loads in prefill and in decode, [L, E] of
    counts or shares: float64 [L], 0 where a layer is empty.

    Source: DAOP (arXiv 2501.10375), equation 1; a cosine does not see the scale, so
    counts serve as well.
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

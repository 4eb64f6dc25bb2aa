"""Statistics of a trace before any machine is involved: how many experts work, how
evenly, and how long they stay in use.

All figures are per layer and about decode, one sequence at a time, unless they say
otherwise.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.schema import Phase
from moesim.traces.stats.hit_rate_curves import before

if TYPE_CHECKING:
    from moesim.traces.format.batch import LayerSteps
    from moesim.traces.format.reader import SequenceRows, Trace
    from moesim.traces.format.schema import ModelShape

WINDOW_STEPS = 32
# Windows of 1, 2, 4, … 1024 steps.
_WINDOWS = 11


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


def expert_uses(
    layer: np.ndarray, experts: np.ndarray, shape: ModelShape
) -> np.ndarray:
    """Count how often each expert was chosen: int64 [L, E].

    Args:
        layer: int [N].
        experts: int [..., N, K].
        shape: the model.
    """
    size = (shape.layers, shape.experts)
    choice = layer.astype(np.int64)[:, None] * shape.experts + experts
    return np.bincount(choice.reshape(-1), minlength=math.prod(size)).reshape(size)


class LayerAggregator:
    """Counts layer steps into tables; memory is that of the tables.

    Attributes:
        steps: int64 [P], forward passes so far.
        load: int64 [L, E], tokens routed to each expert in decode.
    """

    def __init__(self, shape: ModelShape) -> None:
        layers = shape.layers
        self.steps = np.zeros(len(Phase), np.int64)
        self.load = np.zeros((layers, shape.experts), np.int64)
        self._layers = layers
        self._experts = shape.experts
        self._top_k = shape.top_k
        # Active experts and tokens times K.
        self._active = np.zeros((len(Phase), layers))
        self._choices = np.zeros((len(Phase), layers))

        # The decode step in which each expert was used last, -1 before that.
        self._last_use = np.full(layers * shape.experts, -1, np.int64)
        self._last_batch = -1
        # Sums of shares, and how many steps follow one of their batch.
        self._overlap = np.zeros(layers)
        self._pairs = np.zeros(layers, np.int64)
        # First uses in aligned windows of 2 ** w decode steps, [L, W].
        self._first_uses = np.zeros((layers, _WINDOWS), np.int64)

    def add(self, block: LayerSteps) -> None:
        """Take a block of whole forward passes."""
        sizes = np.diff(block.edges)
        table = self._active.shape
        place = block.phase * np.int64(self._layers) + block.layer
        active = np.bincount(place, sizes, self._active.size)
        of_access = np.repeat(place, sizes)
        choices = np.bincount(of_access, block.tokens, self._choices.size)
        self._active += active.reshape(table)
        self._choices += choices.reshape(table)

        chosen = block.phase == Phase.DECODE
        if chosen.any():
            accesses = np.repeat(chosen, sizes)
            sizes = sizes[chosen]
            key = np.repeat(block.layer[chosen], sizes) * self._experts
            key += block.experts[accesses]
            self._add_decode(block.batch[chosen], sizes, key, block.tokens[accesses])
        self.steps += np.bincount(block.phase[block.layer == 0], minlength=len(Phase))

    def _add_decode(
        self, batch: np.ndarray, sizes: np.ndarray, key: np.ndarray, tokens: np.ndarray
    ) -> None:
        """Count N decode layer steps: their batches and accesses, [N], and the expert
        of all layers and the tokens of each access, [A].
        """
        layers = self._layers
        self.load += (
            np.bincount(key, tokens, self.load.size)
            .astype(np.int64)
            .reshape(self.load.shape)
        )

        # Decode steps alone: a prompt between them is no step of a window.
        count = len(sizes) // layers
        owner = np.repeat(np.arange(len(sizes)), sizes)
        step = self.steps[Phase.DECODE] + owner // layers
        last = before(key, step, self._last_use)
        again = np.bincount(owner, last == step - 1, len(sizes)).reshape(count, layers)

        batches = batch[::layers]
        follows = np.diff(batches, prepend=self._last_batch) == 0
        self._last_batch = batches[-1]
        sizes = sizes.reshape(count, layers)
        compared = follows[:, None] & (sizes > 0)
        shares = np.where(compared, again / np.maximum(sizes, 1), 0)
        self._overlap += shares.sum(axis=0)
        self._pairs += compared.sum(axis=0)

        # Two steps lie in one aligned window of 2 ** w where they differ only in their
        # lowest w bits.
        for w in range(_WINDOWS):
            is_first = last >> w != step >> w
            self._first_uses[:, w] += np.bincount(
                owner[is_first] % layers, minlength=layers
            )

    def figures(self) -> dict[str, Any]:
        """Return the figures of `moesim.traces.stats.trace_summary.summarise_trace`
        that come from here; None where the trace has nothing to say.
        """
        prefills, steps = self.steps.tolist()
        # Tokens of the fullest layer: a ragged prefill leaves others with fewer.
        tokens = self._choices.max(axis=1).astype(np.int64) // self._top_k

        share = self.load / np.maximum(self.load.sum(axis=1, keepdims=True), 1)
        # The logarithm of 1 stands for that of an expert without load: it adds nothing.
        logarithm = np.log2(np.where(share > 0, share, 1.0))
        windows = self._working_sets()
        by_layer = {
            "active": steps and self._active[Phase.DECODE] / steps,
            "active_prefill": prefills and self._active[Phase.PREFILL] / prefills,
            "entropy_bits": steps and -(share * logarithm).sum(axis=1),
            "max_share": steps and share.max(axis=1),
            # Without a second step in every layer there is nothing to compare.
            "overlap": self._pairs.all() and self._overlap / np.maximum(self._pairs, 1),
            "working_set": windows.get(WINDOW_STEPS, False),
            "touched": steps and (self.load > 0).sum(axis=1),
        }
        return {
            "prefill_tokens": int(tokens[Phase.PREFILL]),
            "decode_tokens": int(tokens[Phase.DECODE]),
            "decode_steps": steps,
            "overlap_chance": self._top_k / self._experts,
            **{
                name: values.tolist() if isinstance(values, np.ndarray) else None
                for name, values in by_layer.items()
            },
            "working_set_by_window": {
                str(size): float(sets.mean()) for size, sets in windows.items()
            },
        }

    def _working_sets(self) -> dict[int, np.ndarray]:
        """Window in decode steps -> mean distinct experts over the whole windows that
        there were, float64 [L].
        """
        steps = int(self.steps[Phase.DECODE])
        last_use = self._last_use.reshape(self._layers, -1)
        sets = {}
        for w in range(_WINDOWS):
            windows = steps >> w
            if windows:
                # The window that has not ended does not count.
                begun = (last_use >> w == windows).sum(axis=1)
                sets[1 << w] = (self._first_uses[:, w] - begun) / windows
        return sets


# -- similarity ------------------------------------------------------------------------
# How similar are prompt and answer, one layer and the next?
#
# Everything here is about single sequences, so a batch changes nothing. L layers, E
# experts, K per token.


# Counted at a time.
_PART_TOKENS = 4096


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


def joint_counts(routing: np.ndarray, experts: int, gap: int = 1) -> np.ndarray:
    """Count which experts a token uses in layers `gap` apart, in `routing` [T, L, K]:
    int64 [L - gap, E, E].
    """
    layers = routing.shape[1]
    joint = np.empty((layers - gap, experts**2), np.int64)
    for layer in range(layers - gap):
        pairs = routing[:, layer, :, None].astype(np.intp) * experts
        pairs = pairs + routing[:, layer + gap, None, :]
        joint[layer] = np.bincount(pairs.reshape(-1), minlength=experts**2)
    return joint.reshape(-1, experts, experts)


class SimilarityAggregator:
    """Takes sequences one by one; memory is that of the tables, chiefly int64 [L - 1,
    E, E].
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        layers = shape.layers
        experts = shape.experts

        self._tokens = 0
        self._joint = np.zeros((layers - 1, experts, experts), np.int64)
        # Parts whose pairs are not counted yet: a table of pairs is large, and
        # sequences may be short.
        self._waiting: list[np.ndarray] = []

        # Sequences that have both a prompt and an answer, and their cosines' sums.
        self._compared = 0
        self._cosines = np.zeros(layers)

    def add(self, rows: SequenceRows) -> None:
        """Take one sequence."""
        prompt = int(np.count_nonzero(rows.phase == Phase.PREFILL))

        decode = rows.experts[prompt:].reshape(-1, self.shape.layers, self.shape.top_k)
        if not len(decode):
            return

        self._tokens += len(decode)
        for part in np.split(decode, range(_PART_TOKENS, len(decode), _PART_TOKENS)):
            self._waiting.append(part)
            if sum(map(len, self._waiting)) >= _PART_TOKENS:
                self._count_pairs()

        # A sequence without a prompt has nothing to compare with.
        if prompt:
            prefill_load, decode_load = (
                expert_uses(rows.layer[part], rows.experts[part], self.shape)
                for part in (slice(prompt), slice(prompt, None))
            )
            self._cosines += cosines(prefill_load, decode_load)
            self._compared += 1

    def _count_pairs(self) -> None:
        routing = np.concatenate(self._waiting)
        self._joint += joint_counts(routing, self.shape.experts)
        self._waiting = []

    def figures(self) -> dict[str, Any]:
        """Return the figures of `moesim.traces.stats.trace_summary.summarise_trace`
        that come from here; None where the trace has nothing to say.
        """
        shape = self.shape
        similarity = self._cosines / self._compared if self._compared else None
        information = None
        if self._waiting:
            self._count_pairs()
        if self._tokens:
            information = [mutual_information_bits(table) for table in self._joint]

        return {
            "similarity": None if similarity is None else float(similarity.mean()),
            "similarity_by_layer": None if similarity is None else similarity.tolist(),
            "information_bits": information,
            "information_bias_bits": information_bias_bits(
                self._tokens, shape.experts, shape.top_k
            ),
        }

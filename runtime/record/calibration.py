"""Writes a calibration file: all that policies may know of a model beforehand.

Counted from a trace that no evaluation uses, beside the residual vectors of the same
model: a safetensors file with named tensors, each of which a policy asks for by its
name. The file also loads as residual vectors alone.

N sequences, L MoE layers, E routed experts, H hidden.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from safetensors.numpy import save

from moesim.policies.cache._slot_shares import kept_alone
from moesim.policies.prefetch._transitions import Transitions
from moesim.traces.errors import TraceError
from moesim.traces.files import write_bytes
from moesim.traces.format.reader import open_trace
from moesim.traces.tensor_seal import sealed

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.runtime.record.residual import Residual
    from moesim.traces.format.reader import SequenceRows, Trace

FACTS_KEY: Final = "moesim_calibration"
_RESIDUAL_KEY: Final = "moesim"
_GATING_COLUMNS: Final = ("weights", "pred1_raw")
_NAMED_FACTS: Final = ("model", "weights", "prompts", "sequences", "date")

THRESHOLD: Final = (0.005 / 0.27) ** 0.5
"""Share of the weight below which AdapMoE's gating, with its default budget and
sensitivity, leaves an expert out.
"""


def count(trace: Trace) -> dict[str, np.ndarray]:
    """Count what the experts of a trace did, one sequence after the other.

    Returns:
        ``transitions`` float64 [L, E, E] (`moesim.policies.prefetch._transitions`),
        ``activation_matrices`` float64 [N, L, E]
        (`moesim.policies.prefetch._activation_store`) and ``activation_counts``
        float64 [L, E], their sum over sequences. Where the trace has combine weights
        and predictions, also ``single_share`` and ``prefetch_accuracy``, float64 [L]
        (`moesim.policies.cache._slot_shares`): tokens that AdapMoE's gating leaves one
        expert, and those whose best expert predicted one layer earlier is among their
        own; 0 for the first layer.

    Raises:
        TraceError: the trace is damaged.
    """
    layers = trace.shape.layers
    experts = trace.shape.experts
    transitions = Transitions(layers, experts)
    matrices = []
    has_gating = set(_GATING_COLUMNS) <= trace.columns
    gating = _GatingCounts(layers)

    for rows in trace.sequences(_GATING_COLUMNS if has_gating else ()):
        flat = rows.layer.astype(np.int64)[:, None] * experts + rows.experts
        uses = np.bincount(flat.ravel(), minlength=layers * experts)
        matrices.append(uses.reshape(layers, experts))
        for layer in range(layers - 1):
            current, following = _same_tokens(rows, layer)
            transitions.observe(layer, rows.experts[current], rows.experts[following])
            if has_gating:
                gating.count_predictions(rows, layer, current, following)
        if has_gating:
            gating.count_single(rows)

    activations = np.asarray(matrices, np.float64)
    tensors = {
        "transitions": transitions.table(),
        "activation_matrices": activations,
        "activation_counts": activations.sum(axis=0),
    }
    return tensors | gating.shares() if has_gating else tensors


def write_calibration(
    trace: Path | str, out: Path | str, residual: Residual | None = None
) -> dict[str, Any]:
    """Write the calibration file of a trace.

    Args:
        trace: a recording of calibration text.
        out: the safetensors file; an existing one is replaced at the end.
        residual: vectors of the same model, stored as ``residual`` float32 [L, H].

    Returns:
        What the file says about itself: model, weights, prompts and sequences of the
            trace, tensors and shapes.

    Raises:
        TraceError: the trace is damaged, or belongs to an evaluation.
    """
    opened = open_trace(trace)
    # What was learned from a text must not be measured on it.
    if opened.header.split != "calibration":
        raise TraceError(
            f"{trace}: expected a trace of calibration text, found split"
            f" {opened.header.split!r}"
        )

    tensors = count(opened)
    metadata = {}
    if residual is not None:
        tensors["residual"] = np.ascontiguousarray(residual.vectors, np.float32)
        # Under the key of a residual file, as which this one loads too.
        metadata[_RESIDUAL_KEY] = json.dumps(residual.facts, sort_keys=True)

    provenance = opened.header.provenance
    facts: dict[str, Any] = {
        name: provenance[name] for name in _NAMED_FACTS if name in provenance
    }
    facts["tensors"] = {
        name: list(tensor.shape) for name, tensor in sorted(tensors.items())
    }
    metadata[FACTS_KEY] = json.dumps(facts, sort_keys=True)
    write_bytes(out, save(tensors, sealed(tensors, metadata)))
    return facts


class _GatingCounts:
    """Counts, per layer, what AdapMoE's gating and prefetching would do. All [L]."""

    def __init__(self, layers: int) -> None:
        self._single = np.zeros(layers)
        self._tokens = np.zeros(layers)
        self._correct = np.zeros(layers)
        self._predicted = np.zeros(layers)

    def count_predictions(
        self,
        rows: SequenceRows,
        layer: int,
        current: np.ndarray,
        following: np.ndarray,
    ) -> None:
        """Count tokens whose best predicted expert is among those of the next layer."""
        best = rows.columns["pred1_raw"][current].argmax(axis=1)
        correct = (best[:, None] == rows.experts[following]).any(axis=1)
        # Counted for the layer that was predicted, not for the one that predicts.
        self._correct[layer + 1] += correct.sum()
        self._predicted[layer + 1] += len(current)

    def count_single(self, rows: SequenceRows) -> None:
        """Count tokens that gating leaves one expert."""
        for layer in range(len(self._tokens)):
            weights = rows.columns["weights"][rows.layer == layer]
            self._single[layer] += len(weights) * kept_alone(weights, THRESHOLD)
            self._tokens[layer] += len(weights)

    def shares(self) -> dict[str, np.ndarray]:
        """Return the shares of tokens, by tensor name."""
        # A layer without tokens has zero counts: divided by one they stay zero.
        return {
            "prefetch_accuracy": self._correct / np.maximum(self._predicted, 1),
            "single_share": self._single / np.maximum(self._tokens, 1),
        }


def _same_tokens(rows: SequenceRows, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of one layer and of the next, in pairs of the same token.

    By position: a damaged or foreign trace may lack tokens at one of the two layers.
    """
    current = np.flatnonzero(rows.layer == layer)
    following = np.flatnonzero(rows.layer == layer + 1)
    _, at_current, at_following = np.intersect1d(
        rows.pos[current],
        rows.pos[following],
        assume_unique=True,
        return_indices=True,
    )
    return current[at_current], following[at_following]

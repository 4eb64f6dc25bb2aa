"""Everything that policies may know of a model beforehand, in one file.

Counted from a trace that no evaluation uses, beside the residual vectors of the same
model: a safetensors file with named tensors, each of which a policy asks for by its
name. The file also loads as residual vectors alone.

N sequences, L MoE layers, E routed experts, H hidden.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from moesim.policies.cache._slot_shares import kept_alone
from moesim.policies.prefetch._transitions import Transitions
from moesim.traces.errors import TraceError
from moesim.traces.files import written_beside
from moesim.traces.format.reader import open_trace
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.runtime.record.residual import Residual
    from moesim.traces.format.reader import Trace

FACTS_KEY: Final = "moesim_calibration"
_RESIDUAL_KEY: Final = "moesim"
_GATING: Final = ("weights", "pred1_raw")
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
    follows = Transitions(layers, experts)
    matrices = []
    more = _GATING if set(_GATING) <= trace.columns else ()
    alone = np.zeros(layers)
    right = np.zeros(layers)
    seen = np.zeros((2, layers))
    for rows in trace.sequences(more):
        flat = rows.layer.astype(np.int64)[:, None] * experts + rows.experts
        matrices.append(
            np.bincount(flat.ravel(), minlength=layers * experts).reshape(
                layers, experts
            )
        )
        for layer in range(layers - 1):
            here = rows.layer == layer
            next_ = rows.layer == layer + 1
            _, mine, theirs = np.intersect1d(
                rows.pos[here], rows.pos[next_], assume_unique=True, return_indices=True
            )
            follows.observe(
                layer, rows.experts[here][mine], rows.experts[next_][theirs]
            )
            if more:
                best = rows.columns["pred1_raw"][here][mine].argmax(axis=1)
                right[layer + 1] += (
                    (best[:, None] == rows.experts[next_][theirs]).any(axis=1).sum()
                )
                seen[0, layer + 1] += len(mine)
        for layer in range(layers) if more else ():
            weights = rows.columns["weights"][rows.layer == layer]
            alone[layer] += len(weights) * kept_alone(weights, THRESHOLD)
            seen[1, layer] += len(weights)
    each = np.asarray(matrices, np.float64)
    found = {
        "transitions": follows.table(),
        "activation_matrices": each,
        "activation_counts": each.sum(axis=0),
    }
    if more:
        found |= {
            "prefetch_accuracy": right / np.maximum(seen[0], 1),
            "single_share": alone / np.maximum(seen[1], 1),
        }
    return found


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
    if opened.header.split != "calibration":
        raise TraceError(
            f"{trace}: expected a trace of calibration text, found split"
            f" {opened.header.split!r}"
        )
    tensors = count(opened)
    metadata = {}
    if residual is not None:
        tensors["residual"] = np.ascontiguousarray(residual.vectors, np.float32)
        metadata[_RESIDUAL_KEY] = json.dumps(residual.facts, sort_keys=True)
    said = opened.header.provenance
    facts: dict[str, Any] = {
        name: said[name]
        for name in ("model", "weights", "prompts", "sequences", "date")
        if name in said
    }
    facts["tensors"] = {
        name: list(tensor.shape) for name, tensor in sorted(tensors.items())
    }
    metadata[FACTS_KEY] = json.dumps(facts, sort_keys=True)
    with written_beside(out) as part:
        save_file(tensors, part, metadata=metadata)
    return facts

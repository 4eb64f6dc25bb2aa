"""Calibration from a model and its routing: residual vectors between the inputs of
neighbouring gates, and how often each expert is chosen; as files with their facts.

L MoE layers, H hidden, T tokens.

Counted from a trace that no evaluation uses, beside the residual vectors of the same
model: a safetensors file with named tensors, each of which a policy asks for by its
name. The file also loads as residual vectors alone.

``--init-expert-location FILE.pt`` with ``--kt-expert-placement-strategy frequency``
takes a tensor ``logical_count`` [passes, layers, experts] over all layers of the model,
those without experts included. Source: `kt_ep_wrapper.py` of kvcache-ai/sglang.

N sequences, T tokens, L MoE layers, E routed experts, H hidden.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from moesim.base.errors import TraceError
from moesim.base.files import write_bytes
from moesim.base.inputs import parse_json
from moesim.base.seals import check_tensors, sealed_metadata
from moesim.policies.arrays import view_of
from moesim.policies.cache._slot_shares import kept_alone
from moesim.policies.prefetch.statistical import Transitions
from moesim.runtime import text as corpus
from moesim.runtime.models.checkpoint import weights_digest
from moesim.runtime.models.gates import find_blocks, gate_facts
from moesim.runtime.record.gate_observer import GateObserver
from moesim.traces.format.reader import open_trace
from moesim.traces.stats.statistics import expert_uses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from moesim.runtime.models.local_model import LocalModel
    from moesim.traces.format.reader import SequenceRows, Trace


_TENSOR: Final = "residual"
_METADATA: Final = "moesim"
_TEXTS: Final = 64
_TEXT_BYTES: Final = 384


@dataclass(frozen=True, slots=True)
class Residual:
    """Residual vectors and where they came from.

    Attributes:
        vectors: float32 [L, H]; the last layer has no successor and holds zeros.
        facts: model, weights digest, texts digest, tokens.
    """

    vectors: np.ndarray
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Name the vectors and their origin: 16 hexadecimal digits of a SHA-256."""
        total = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode())
        total.update(np.ascontiguousarray(self.vectors, dtype=np.float32).tobytes())
        return total.hexdigest()[:16]

    def save(self, path: Path | str) -> None:
        """Write a safetensors file: beside the target, then renamed onto it."""
        vectors = np.ascontiguousarray(self.vectors, dtype=np.float32)
        metadata = {_METADATA: json.dumps(self.facts, sort_keys=True)}
        write_bytes(
            path,
            save({_TENSOR: vectors}, sealed_metadata({_TENSOR: vectors}, metadata)),
        )

    @classmethod
    def load(cls, path: Path | str) -> Residual:
        """Read a file written by `save`.

        Raises:
            TraceError: not such a file.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            check_tensors(Path(path), arrays, metadata)
            facts = parse_json(
                metadata[_METADATA],
                dict[str, Any],
                where=str(path),
                error=TraceError,
                way_out="calibrate again",
            )
            loaded = cls(arrays[_TENSOR], facts)
        except TraceError:
            raise
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise TraceError(
                f"{path}: expected residual vectors of a moesim calibration, found"
                f" {type(error).__name__}: {error}; calibrate again"
            ) from None

        # One vector that is no number would make every prediction of its layer none.
        vectors = loaded.vectors
        if vectors.ndim != 2 or not vectors.size or not np.isfinite(vectors).all():
            raise TraceError(
                f"{path}: expected finite vectors [layers, hidden], found"
                f" {vectors.dtype} {list(vectors.shape)}; calibrate again"
            )
        return loaded


def mean_drift(gate_inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Average the step from each layer's gate input to the next one's.

    Args:
        gate_inputs: L arrays [T, H].

    Returns:
        float64 [L, H]: ``mean over tokens of (gate_in[l+1] - gate_in[l])``, zeros for
            the last layer.

    Source: DALI, equations 10-11.
    """
    states = np.stack(gate_inputs).astype(np.float64)
    drift = np.zeros((states.shape[0], states.shape[2]))
    drift[:-1] = np.diff(states, axis=0).mean(axis=1)
    return drift


def residual_vectors(
    local: LocalModel, texts: Iterable[str | bytes] | None = None
) -> Residual:
    """Calibrate a model: one forward pass per text, every token counted once.

    Args:
        local: the model.
        texts: calibration texts that no evaluation uses; by default 64 excerpts of 384
            bytes from the calibration part of the Python corpus.

    Raises:
        TraceError: no text has a token, or the model has no MoE layers.
    """
    if texts is None:
        texts = corpus.prompts("calibration", _TEXTS, _TEXT_BYTES, seed=0)
    blocks = find_blocks(local.model)
    facts = gate_facts(local.model, blocks)

    # Takes the shape of the first text's drift.
    total = np.zeros(())
    tokens = 0
    digest = hashlib.sha256()
    with (
        GateObserver(blocks, facts, states_only=True) as observer,
        torch.inference_mode(),
    ):
        for ids in filter(None, map(local.encode, texts)):
            local.model(
                input_ids=torch.tensor([ids], device=local.device), use_cache=False
            )
            states = [
                layer["hidden"].float().cpu().numpy() for layer in observer.layers
            ]
            # Weighted by length, so that a long text is not worth a short one.
            total = total + len(ids) * mean_drift(states)
            tokens += len(ids)
            # With its length, so that tokens cannot move from one text to the next.
            digest.update(np.asarray([len(ids), *ids], dtype="<i4").tobytes())
    if not tokens:
        raise TraceError(
            "calibration texts: expected at least one token, found none; pass some text"
        )

    return Residual(
        (total / tokens).astype(np.float32),
        facts={
            "model": local.name,
            "weights": weights_digest(local.model),
            "texts": digest.hexdigest(),
            "tokens": tokens,
        },
    )


def residual_for(
    columns: Sequence[str],
    given: str | Path | Residual | None,
    shipped: Callable[[], LocalModel] | None,
) -> Residual | None:
    """Vectors for ``pred1_res``: as given, or the shipped model's own.

    Args:
        columns: what the policies read.
        given: vectors, or the file that holds them.
        shipped: loads the shipped model, where that is the one that runs.

    Returns:
        None where no policy reads them, or there are none.
    """
    # Calibrating takes seconds, so it is done only where a policy reads the column.
    if "pred1_res" not in columns:
        return None
    if isinstance(given, Residual):
        return given
    if given is not None:
        return Residual.load(given)
    return None if shipped is None else residual_vectors(shipped())


FACTS_KEY: Final = "moesim_calibration"
_GATING_COLUMNS: Final = ("weights", "pred1_raw")
_NAMED_FACTS: Final = ("model", "weights", "prompts", "sequences", "date")

THRESHOLD: Final = (0.005 / 0.27) ** 0.5
"""Share of the weight below which AdapMoE's gating, with its default budget and
sensitivity, leaves an expert out.
"""


def count(trace: Trace) -> dict[str, np.ndarray]:
    """Count what the experts of a trace did, one sequence after the other.

    Returns:
        ``transitions`` float64 [L, E, E] (`moesim.policies.prefetch.statistical`),
        ``activation_matrices`` float64 [N, L, E]
        (`moesim.policies.prefetch.activation_matrix`) and ``activation_counts``
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
    # By layer: tokens that gating leaves one expert, of all; tokens whose best
    # predicted expert is among theirs, of those that were predicted.
    single, tokens, correct, predicted = np.zeros((4, layers))

    for rows in trace.sequences(_GATING_COLUMNS if has_gating else ()):
        matrices.append(expert_uses(rows.layer, rows.experts, trace.shape))
        for layer in range(layers):
            if has_gating:
                weights = rows.columns["weights"][rows.layer == layer]
                single[layer] += len(weights) * kept_alone(weights, THRESHOLD)
                tokens[layer] += len(weights)
            if layer == 0:
                continue
            before, now = _same_tokens(rows, layer - 1)
            used = view_of(rows.experts[now], np.uint16)
            transitions.observe(
                layer - 1, view_of(rows.experts[before], np.uint16), used
            )
            if has_gating:
                best = rows.columns["pred1_raw"][before].argmax(axis=1)
                correct[layer] += (best[:, None] == rows.experts[now]).any(axis=1).sum()
                predicted[layer] += len(now)

    activations = np.asarray(matrices, np.float64)
    tensors = {
        "transitions": transitions.table(),
        "activation_matrices": activations,
        "activation_counts": activations.sum(axis=0),
    }
    if has_gating:
        # A layer without tokens has zero counts: divided by one they stay zero.
        tensors["prefetch_accuracy"] = correct / np.maximum(predicted, 1)
        tensors["single_share"] = single / np.maximum(tokens, 1)
    return tensors


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
        metadata[_METADATA] = json.dumps(residual.facts, sort_keys=True)

    provenance = opened.header.provenance
    facts: dict[str, Any] = {
        name: provenance[name] for name in _NAMED_FACTS if name in provenance
    }
    facts["tensors"] = {
        name: list(tensor.shape) for name, tensor in sorted(tensors.items())
    }
    metadata[FACTS_KEY] = json.dumps(facts, sort_keys=True)
    write_bytes(out, save(tensors, sealed_metadata(tensors, metadata)))
    return facts


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

"""Residual vectors: the mean drift of the hidden state from one gate to the next.

A gate called on the state one layer early sees a state that the coming attention and
experts have not yet moved. Part of that movement is the same for every token; its mean
over a calibration text is one vector per layer, and `pred1_res` is what the next gate
scores once that vector has been added. Whether that helps depends on the model.

L MoE layers, H hidden, T tokens.
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

from moesim.runtime.models.gates import gate_facts
from moesim.runtime.models.model_weights import weights_digest
from moesim.runtime.models.moe_blocks import find_blocks
from moesim.runtime.record.gate_observer import GateObserver
from moesim.runtime.text import corpus
from moesim.traces.checked import parse_json
from moesim.traces.errors import TraceError
from moesim.traces.files import write_bytes
from moesim.traces.tensor_seal import check, sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from moesim.runtime.models.local_model import LocalModel

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
            path, save({_TENSOR: vectors}, sealed({_TENSOR: vectors}, metadata))
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
            check(Path(path), arrays, metadata)
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
            states = [layer.hidden.float().cpu().numpy() for layer in observer.layers]
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

"""How far the hidden state drifts from one gate to the next: DALI's residual vectors.

A gate asked about the state one layer early sees a state that the coming attention and
experts have not yet moved. Part of that movement is the same for every token; its mean
over a calibration text is one vector per layer, and `pred1_res` is what the next gate
says once that vector has been added. Whether that helps depends on the model.

L MoE layers, H hidden, T tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from moesim.runtime.models import corpus
from moesim.runtime.models.gates import GateTap
from moesim.runtime.models.hf import LocalModel, find_blocks, gate_facts, weights_digest
from moesim.traces.errors import TraceError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(target.name + ".part")
        vectors = np.ascontiguousarray(self.vectors, dtype=np.float32)
        save_file(
            {_TENSOR: vectors},
            beside,
            metadata={_METADATA: json.dumps(self.facts, sort_keys=True)},
        )
        os.replace(beside, target)  # noqa: PTH105 - named as the promise is

    @classmethod
    def load(cls, path: Path | str) -> Residual:
        """Read a file written by `save`.

        Raises:
            TraceError: not such a file.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                facts = json.loads((file.metadata() or {})[_METADATA])
                return cls(file.get_tensor(_TENSOR), facts)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise TraceError(
                f"{path}: expected residual vectors of a moesim calibration, found"
                f" {type(error).__name__}: {error}; calibrate again"
            ) from None


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
    chosen = (
        corpus.prompts("calibration", _TEXTS, _TEXT_BYTES, seed=0)
        if texts is None
        else texts
    )
    blocks = find_blocks(local.model)
    total = np.zeros(())
    tokens = 0
    digest = hashlib.sha256()
    with (
        GateTap(blocks, gate_facts(local.model, blocks), states_only=True) as tap,
        torch.inference_mode(),
    ):
        for ids in filter(None, map(local.encode, chosen)):
            local.model(
                input_ids=torch.tensor([ids], device=local.device), use_cache=False
            )
            total = total + len(ids) * mean_drift(
                [heard.hidden.float().cpu().numpy() for heard in tap.heard]
            )
            tokens += len(ids)
            digest.update(np.asarray([len(ids), *ids], dtype="<i4").tobytes())
    if not tokens:
        raise TraceError(
            "calibration texts: expected at least one token, found none; pass some text"
        )
    facts = {
        "model": local.name,
        "weights": weights_digest(local.model),
        "texts": digest.hexdigest(),
        "tokens": tokens,
    }
    return Residual((total / tokens).astype(np.float32), facts)


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
        None where nobody reads them, or nobody has them.
    """
    if "pred1_res" not in columns:
        return None
    if isinstance(given, Residual):
        return given
    if given is not None:
        return Residual.load(given)
    return None if shipped is None else residual_vectors(shipped())

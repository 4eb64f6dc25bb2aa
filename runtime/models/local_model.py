"""A model on this machine, with its tokenizer; nothing is ever downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError

from moesim.runtime.models import tiny
from moesim.runtime.models.configuration import text_config
from moesim.traces.errors import TraceError

if TYPE_CHECKING:
    from torch import nn

BYTE_VOCABULARY: Final = 258
"""A model without a tokenizer whose vocabulary is at most 256 bytes and two specials
reads bytes.
"""

_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that is here, with its tokenizer; without one, tokens are bytes."""

    name: str
    model: nn.Module
    tokenizer: Any = None

    def encode(self, text: str | bytes) -> list[int]:
        """Turn text into token ids."""
        if self.tokenizer is None:
            return list(text.encode() if isinstance(text, str) else text)
        decoded = text if isinstance(text, str) else text.decode(errors="replace")
        return list(self.tokenizer(decoded)["input_ids"])

    @property
    def device(self) -> torch.device:
        """Where tokens enter the model."""
        embeddings: Any = self.model.get_input_embeddings()
        return embeddings.weight.device


def load_model(
    spec: str | Path, *, device: str = "cpu", dtype: str = "auto"
) -> LocalModel:
    """Load ``tiny`` (the shipped model) or a local Hugging Face directory. Nothing is
    downloaded.

    Args:
        spec: ``tiny``, or a directory with `config.json` and weights.
        device: ``cpu``, ``cuda``, …
        dtype: ``auto`` keeps that of the checkpoint (``tiny`` then computes in float32,
            as CPUs like it).

    Raises:
        TraceError: no such directory, or neither a tokenizer nor a byte-sized
            vocabulary.
        FileNotFoundError: the shipped checkpoint is missing.
    """
    if str(spec) == "tiny":
        precision = torch.float32 if dtype == "auto" else getattr(torch, dtype)
        return LocalModel("tiny", tiny.load_tiny(dtype=precision).to(device))

    folder = Path(spec)
    if not (folder / "config.json").is_file():
        raise TraceError(
            f"{folder}: expected a Hugging Face model directory with config.json, or"
            " 'tiny'; found none"
        )
    model = _load_weights(folder, dtype)
    tokenizer = _load_tokenizer(folder, text_config(model).vocab_size)
    return LocalModel(folder.resolve().name, model.eval().to(device), tokenizer)


def _load_weights(folder: Path, dtype: str) -> Any:
    """Load a causal language model from its directory."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - seconds to import

    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise TraceError(
            f"{folder}: not a loadable causal language model:"
            f" {str(error).splitlines()[0]}"
        ) from error


def _load_tokenizer(folder: Path, vocabulary: int) -> Any:
    """Load a directory's tokenizer; None where the model reads bytes."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds to import

    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # Without the check, a model of words would be fed bytes and answer nonsense.
    if vocabulary > BYTE_VOCABULARY:
        raise TraceError(
            f"{folder}: expected a tokenizer ({', '.join(_TOKENIZER_FILES)}) or a"
            f" byte-level vocabulary of at most {BYTE_VOCABULARY}, found neither; copy"
            " the model's tokenizer files there"
        )
    return None

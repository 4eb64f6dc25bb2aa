"""Hugging Face configurations: reading one, building its model, finding settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moesim.runtime.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn


def read_config(model_dir: Path) -> tuple[Any, Any]:
    """Read a directory's configuration; return it with the model's class.

    Raises:
        StoreError: no such directory, no config.json, a quantised model, or not a
            causal language model.
    """
    from transformers import (  # noqa: PLC0415 - seconds to import
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
    )

    if not (model_dir / "config.json").is_file():
        raise StoreError(
            f"{model_dir}: expected a Hugging Face model directory with config.json,"
            " found none"
        )

    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(
            f"{model_dir}: not a causal language model: {str(error).splitlines()[0]}"
        ) from None

    if getattr(config, "quantization_config", None) is not None:
        raise StoreError(
            f"{model_dir}: expected float weights, found a quantised checkpoint; load"
            " it dequantised with transformers and save it with save_pretrained first"
        )
    return config, model_class


def skeleton(model_dir: Path) -> Any:
    """Build a directory's model without memory for its weights (on ``meta``).

    Raises:
        StoreError: as in `read_config`.
    """
    config, model_class = read_config(model_dir)
    with torch.device("meta"):
        return model_class(config)


def text_config(model: nn.Module) -> Any:
    """Return the language part of a configuration."""
    config: Any = model.config
    # Multimodal models keep their language settings one level down.
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def first_setting(config: Any, names: Iterable[str], default: Any) -> Any:
    """Return the first of these settings that a configuration has."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default

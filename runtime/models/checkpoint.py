"""A Hugging Face checkpoint: its configuration, the files and types of its tensors, and
digests that name it.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError, safe_open

from moesim.base.errors import StoreError
from moesim.base.inputs import load_json, read_text

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
        try:
            value = getattr(config, name, None)
        # Layers that differ in it: the first one speaks for all.
        except RuntimeError:
            value = getattr(config.per_layer_config[0], name, None)
        if value is not None:
            return value
    return default


DTYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Names of dtypes in recorded shapes."""

_DIGEST_BYTES: Final = 4096


def tensor_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers; shared tensors count once."""
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def weights_digest(model: nn.Module) -> str:
    """Name the weights: SHA-256 over name, dtype, shape and both ends (4 KiB) of every
    tensor, in hexadecimal.

    Ends instead of everything, so that a model of 60 GB is named in a moment; training
    moves every tensor's ends.
    """
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        # Tensors on meta have no bytes; their shapes still count.
        if tensor.device.type == "meta":
            continue

        flat = tensor.detach().reshape(-1)
        end = _DIGEST_BYTES // tensor.element_size()
        for piece in (flat[:end], flat[-end:]):
            # As bytes, because numpy has no bfloat16.
            raw = piece.cpu().contiguous().view(torch.uint8)
            total.update(raw.numpy().tobytes())
    return total.hexdigest()


_SAMPLED_PAGES: Final = 64
_PAGE_BYTES: Final = 4096
_FLOAT_TYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""As safetensors names them."""


def checkpoint_digest(model_dir: Path) -> str:
    """Name a checkpoint: config, and of every safetensors file its size, its table of
    tensors and 64 sampled pages.

    Samples instead of everything, so that 60 GB are named in a moment; training moves
    every page.
    """
    total = hashlib.blake2b(digest_size=16)
    # Sorted keys, so that a file that was merely reformatted keeps its name.
    config = load_json(read_text(model_dir / "config.json"))
    total.update(json.dumps(config, sort_keys=True).encode())

    for path in sorted(set(tensor_files(model_dir).values())):
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            # A safetensors file begins with the length of its table. The digest takes
            # 8 bytes more than the table: the stores that exist were named so.
            table_bytes = int.from_bytes(file.read(8), "little")
            total.update(file.read(8 + table_bytes))

            last_page = max(size - _PAGE_BYTES, 0)
            for page in range(_SAMPLED_PAGES):
                file.seek(page * last_page // (_SAMPLED_PAGES - 1))
                total.update(file.read(_PAGE_BYTES))
    return total.hexdigest()


def checkpoint_dtype(model_dir: Path) -> torch.dtype:
    """Type of a checkpoint's weights: what its configuration declares, else that of its
    first tensor of floats, as the library chooses with ``dtype="auto"``.

    Raises:
        StoreError: no such model, or a file that cannot be read.
    """
    config, _ = read_config(model_dir)
    if config.dtype is not None:
        declared: torch.dtype = config.dtype
        return declared
    for key, path in tensor_files(model_dir).items():
        with safe_open(path, framework="pt") as file:
            kind = _FLOAT_TYPES.get(file.get_slice(key).get_dtype())
        if kind is not None:
            return kind
    return torch.float32


def tensor_files(model_dir: Path) -> dict[str, Path]:
    """Map every tensor of a checkpoint to its file.

    Raises:
        StoreError: there is no safetensors file, or one is missing or damaged.
    """
    index = model_dir / "model.safetensors.index.json"
    single = model_dir / "model.safetensors"
    if index.is_file():
        return _sharded(model_dir, index)
    if not single.is_file():
        raise StoreError(
            f"{model_dir}: expected model.safetensors or {index.name}, found neither"
        )

    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"{single}: not a safetensors file: {error}; fetch the checkpoint again"
        ) from None


def _sharded(model_dir: Path, index: Path) -> dict[str, Path]:
    """Map tensors as an index file does."""
    try:
        body = load_json(read_text(index))
        weight_map: dict[str, str] = dict(body["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{index}: expected JSON with a weight_map of tensors and files, found"
            f" {type(error).__name__}: {error}; fetch it again"
        ) from None
    files = {key: model_dir / name for key, name in weight_map.items()}

    missing = sorted({path.name for path in files.values() if not path.is_file()})
    if missing:
        raise StoreError(
            f"{model_dir}: {missing[0]}: named in {index.name}, but not there; fetch it"
            " again"
        )
    return files

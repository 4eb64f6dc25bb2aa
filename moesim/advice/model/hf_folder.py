"""Reads a Hugging Face folder: its config and the headers of its safetensors files.

A safetensors file begins with the length of a JSON header that names every tensor with
its type, shape and place; the weights behind it are never read.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesim.advice.model.contents import (
    F16_BYTES,
    LayerContents,
    LayerTensors,
    ModelContents,
    Tensor,
    sort_tensors,
)
from moesim.base.errors import AdviceError
from moesim.base.inputs import load_json, parse_json, read_json, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# A header of more bytes is no header; the largest known models stay below 10 MB.
LONGEST_HEADER = 1 << 30

# Weight formats as this project names them; two four-bit weights share one byte.
FORMATS = {
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "F8_E4M3": "fp8",
    "F8_E5M2": "fp8",
    "U8": "mxfp4",
    "I32": "i32",
}

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k")
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers")


_SIZES = (
    *_EXPERTS,
    *_TOP_K,
    *_LAYERS,
    "head_dim",
    "hidden_size",
    "kv_lora_rank",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "sliding_window",
    "v_head_dim",
)
# Far above every real size, far below what lists of layers would not fit into memory.
LARGEST_SIZE = 1 << 32
# GPTQ and AWQ pack eight weights of four bits into one integer.
PACKED = re.compile(r"qweight|weight_packed")
PACKED_WEIGHTS = 8
MOST_LAYERS = 10_000


@dataclass
class _Index:
    """Which file holds each tensor."""

    weight_map: dict[str, str]


@dataclass
class _Entry:
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def is_hf_folder(path: Path) -> bool:
    """Tell whether a folder holds a Hugging Face config."""
    return path.is_dir() and (path / "config.json").is_file()


def hf_contents(folder: Path) -> ModelContents:
    """Read what a Hugging Face folder holds.

    Raises:
        AdviceError: a broken or missing header, or a model without experts.
    """
    config = _config(folder)
    run_layers = int(_needed(config, _LAYERS, folder))
    if run_layers > MOST_LAYERS:
        raise AdviceError(
            f"{folder / 'config.json'}: layers: expected at most {MOST_LAYERS}, found"
            f" {run_layers}; download the file again"
        )
    parts = sort_tensors(_tensors(folder), run_layers)

    routed_bytes = sum(layer.expert_bytes for layer in parts.layers.values())
    if not routed_bytes:
        raise AdviceError(
            f"{folder}: {config.get('model_type', 'this model')}: no routed experts;"
            " moesim advises on Mixture-of-Experts models only"
        )
    experts = int(_needed(config, _EXPERTS, folder))
    top_k = int(_needed(config, _TOP_K, folder))

    layers = tuple(
        _layer(parts.layers.get(at, LayerTensors()), at, config, experts, top_k)
        for at in range(run_layers)
    )
    head = parts.head if parts.head.dense_bytes else parts.embed
    head_format = next(iter(head.dense_formats), "bf16")
    return ModelContents(
        name=folder.name,
        architecture=str(config.get("model_type", "?")),
        layers=layers,
        embed_bytes=parts.embed.dense_bytes,
        head_bytes=head.dense_bytes,
        head_weights=head.dense_weights,
        head_format=head_format,
        hidden=int(config.get("hidden_size", 0)),
        source="safetensors header",
        quant=head_format.upper(),
        tied=not parts.head.dense_bytes,
        unused_bytes=parts.unused_bytes + parts.rest_bytes,
        table_bytes=parts.table_bytes,
    )


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = load_json(read_text(path))
    except ValueError as error:
        raise AdviceError(
            f"{path}: not JSON: {error}; download the file again"
        ) from None

    if not isinstance(config, dict):
        raise AdviceError(
            f"{path}: expected keys and values, found {config!r:.40}; download the file"
            " again"
        )
    # Models that also see keep their language part in a table of its own.
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config

    for name in _SIZES:
        # Transformers writes null where it has a default of its own.
        if config.get(name, 0) is None:
            del config[name]
        value = config.get(name, 0)
        # Some models state a size for each layer.
        by_layer = name in (*_EXPERTS, *_TOP_K, *_LAYERS)
        sizes = value if by_layer and isinstance(value, list) and value else [value]
        for size in sizes:
            is_size = isinstance(size, int) and 0 <= size <= LARGEST_SIZE
            if not is_size:
                raise AdviceError(
                    f"{path}: {name}: expected a whole number, found {size!r:.40};"
                    " download the file again"
                )
    kinds = config.get("layer_types")
    if not (kinds is None or isinstance(kinds, list)):
        raise AdviceError(
            f"{path}: layer_types: expected a list, found {kinds!r:.40}; download the"
            " file again"
        )
    return config


def _needed(config: Mapping[str, Any], names: tuple[str, ...], folder: Path) -> Any:
    for name in names:
        if config.get(name) is not None:
            value = config[name]
            return max(value) if isinstance(value, list) else value
    raise AdviceError(
        f"{folder / 'config.json'}: expected one of {', '.join(names)}, found none"
    )


def _tensors(folder: Path) -> list[Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise AdviceError(
            f"{folder}: no *.safetensors file beside config.json; their headers hold"
            " the sizes, so download at least those, or give a GGUF file"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        way_out = "download the file again"
        weights = read_json(
            index,
            _Index,
            error=AdviceError,
            expected="an index of tensors",
            way_out=way_out,
        )
        stated = set(weights.weight_map.values())
        missing = sorted(stated - {path.name for path in files})
        # Sizes without those files would be too small.
        if missing:
            raise AdviceError(
                f"{folder}: {len(missing)} of {len(stated)} safetensors files are"
                f" missing, the first is {missing[0]}; download it"
            )
    return [tensor for path in files for tensor in _header(path)]


def _header(path: Path) -> list[Tensor]:
    with path.open("rb") as file:
        size_bytes = file.read(8)
        length = struct.unpack("<Q", size_bytes)[0] if len(size_bytes) == 8 else 0
        text = file.read(min(length, LONGEST_HEADER))

    if not length or length > LONGEST_HEADER or len(text) < length:
        raise AdviceError(
            f"{path}: the safetensors header is cut off; download the file again"
        )
    header = parse_json(
        text,
        dict[str, dict[str, Any]],
        where=f"{path}: damaged safetensors header",
        error=AdviceError,
        way_out="download the file again",
    )
    header.pop("__metadata__", None)
    entries = parse_json(
        json.dumps(header),
        dict[str, _Entry],
        where=f"{path}: damaged safetensors header",
        error=AdviceError,
        way_out="download the file again",
    )

    tensors = []
    for name, entry in entries.items():
        label = FORMATS.get(entry.dtype, entry.dtype.lower())
        begin, end = entry.data_offsets
        # Shapes count stored numbers, which may hold several weights each.
        weights = math.prod(entry.shape)
        if label == "mxfp4":
            weights *= 2
        elif entry.dtype == "I32" and PACKED.search(name):
            weights *= PACKED_WEIGHTS
            label = "q4_0"
        tensors.append(Tensor(name, label, weights, end - begin))
    return tensors


def _layer(
    sums: LayerTensors, at: int, config: Mapping[str, Any], experts: int, top_k: int
) -> LayerContents:
    heads = int(config.get("num_attention_heads", 0))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    hidden = int(config.get("hidden_size", 0))
    head_dim = int(config.get("head_dim") or (hidden // heads if heads else 0))
    rank = int(config.get("kv_lora_rank") or 0)
    kinds = config.get("layer_types") or []
    kind = str(kinds[at]) if at < len(kinds) else "full_attention"
    every = int(config.get("full_attention_interval") or 0)
    if not kinds and every and (at + 1) % every:
        kind = "linear_attention"

    if "linear" in kind or re.search("mamba|recurrent", kind):
        kv_bytes = width = window = 0
    elif rank:
        entry = rank + int(config.get("qk_rope_head_dim", 0))
        kv_bytes = entry * F16_BYTES
        sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        width = heads * sum(int(config.get(name, 0)) for name in sizes)
        window = 0
    else:
        kv_bytes = 2 * kv_heads * head_dim * F16_BYTES
        width = 2 * heads * head_dim
        window = int(config.get("sliding_window") or 0) if "sliding" in kind else 0

    # Dense layers of a mixed model have none.
    routed = bool(sums.expert_bytes)
    return LayerContents(
        dense_bytes=sums.dense_bytes,
        dense_weights=sums.dense_weights,
        dense_formats=dict(sums.dense_formats),
        experts=experts if routed else 0,
        top_k=top_k if routed else 0,
        expert_bytes=sums.expert_bytes,
        expert_weights=sums.expert_weights,
        expert_formats=dict(sums.expert_formats),
        kv_bytes_per_token=kv_bytes,
        window_tokens=window,
        attention_width=width,
        query_group=1 if rank else max(1, heads // max(1, kv_heads)),
    )

"""Reads a Hugging Face folder: its config, and the headers of its safetensors files if
there are any.

A safetensors file begins with the length of a JSON header that names every tensor with
its type, shape and place; the weights behind it are never read.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moesim.advice.model.contents import (
    LayerTensors,
    Tensor,
    sort_tensors,
    stored_contents,
    stored_layer,
)
from moesim.advice.model.hf_config import read_config
from moesim.advice.model.shaped import shaped_contents
from moesim.base.errors import AdviceError
from moesim.base.inputs import parse_json, read_json
from moesim.traces.weight_formats import bytes_per_weight, recipe

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.advice.model.contents import ModelContents
    from moesim.advice.model.hf_config import ConfigShape

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

# GPTQ and AWQ pack eight weights of four bits into one integer.
PACKED = re.compile(r"qweight|weight_packed")
PACKED_WEIGHTS = 8
# What a folder's name says of formats that its config.json does not have.
NAMED = re.compile(r"[-_](fp8|nvfp4|mxfp4|bf16|int4|awq|gptq)(?![a-z0-9])")


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


def hf_contents(folder: Path, quant: str = "") -> ModelContents:
    """Read what a Hugging Face folder holds; without weights, what its config says.

    Args:
        folder: with config.json, and weights or none.
        quant: label of the formats that weights will have, where none are there.

    Raises:
        AdviceError: a broken or missing header, or a model without experts.
    """
    has_weights = any(folder.glob("*.safetensors"))
    shape = read_config(folder / "config.json", has_weights=has_weights)
    if not has_weights:
        return _of_config(folder, shape, quant)
    refuse_quant(quant, folder)
    parts = sort_tensors(_tensors(folder), len(shape.layers))

    routed_bytes = sum(layer.expert_bytes for layer in parts.layers.values())
    if not routed_bytes:
        raise AdviceError(
            f"{folder}: {shape.architecture}: no routed experts;"
            " moesim advises on Mixture-of-Experts models only"
        )
    layers = (
        stored_layer(
            parts.layers.get(at, LayerTensors()),
            each.mixer,
            each.experts,
            each.top_k,
            each.zero_experts,
        )
        for at, each in enumerate(shape.layers)
    )
    contents = stored_contents(
        parts,
        layers,
        name=folder.name,
        architecture=shape.architecture,
        hidden=shape.hidden,
        source="safetensors header",
        table_rows=shape.table_rows,
        assumed=shape.remarks,
    )
    return replace(contents, quant=contents.head_format.upper())


def refuse_quant(quant: str, path: Path) -> None:
    """Refuse a label for what says its own formats."""
    if quant:
        raise AdviceError(
            f"--quant {quant}: {path} says its own formats; leave the option out, or"
            " name the model instead of a file"
        )


def _of_config(folder: Path, shape: ConfigShape, quant: str) -> ModelContents:
    """What weights of this shape would hold, in the formats that are stated."""
    formats = shape.formats
    remarks = ["bytes follow from config.json", *shape.remarks]
    named = NAMED.search(folder.resolve().name.lower())
    label = quant or ("" if shape.is_quantised or named is None else named.group(1))
    if label:
        stated = recipe(
            {"int4": "q4_0", "awq": "q4_0", "gptq": "q4_0"}.get(label, label)
        )
        if stated is None:
            raise AdviceError(
                f"quantisation {label!r}: unknown; expected a label such as Q4_K_M,"
                " FP8, MXFP4 or BF16"
            )
        formats = stated
        if not quant:
            remarks.append(f"formats by the folder's name, {label.upper()}")
    contents = shaped_contents(
        shape.layers,
        formats,
        name=folder.name,
        hidden=shape.hidden,
        vocab=shape.vocab,
        tied=shape.tied,
    )
    return replace(
        contents,
        architecture=shape.architecture,
        source="config.json",
        quant=label.upper() or formats.up.upper(),
        table_bytes=round(shape.table_weights * bytes_per_weight(formats.embed)),
        table_weights=shape.table_weights,
        table_rows=shape.table_rows,
        assumed=tuple(remarks),
    )


def _tensors(folder: Path) -> list[Tensor]:
    files = sorted(folder.glob("*.safetensors"))
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

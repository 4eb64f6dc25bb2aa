"""Sorts tensors into what routed experts are and what every token reads.

The names are llama.cpp's (``blk.3.ffn_up_exps.weight``) and Hugging Face's
(``model.layers.3.mlp.experts.17.up_proj.weight``). Whatever is no routed expert counts
as dense: that is what stays on the GPU when experts are moved to host memory.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

# What llama.cpp's --cpu-moe and --n-cpu-moe move, biases included.
ROUTED_GGUF = re.compile(r"ffn_(?:up|down|gate|gate_up)_(?:ch)?exps\.")
# Files from before 2024-04 hold one tensor per expert: blk.0.ffn_gate.7.weight.
ROUTED_GGUF_OLD = re.compile(r"ffn_(?:up|down|gate)\.\d+\.")
ROUTED_HF = re.compile(r"\.(?:experts|local_experts)\.")
LAYER = re.compile(r"(?:^blk|layers|blocks|h)\.(\d+)\.")

EMBED = re.compile(r"^(?:token_embd\.|.*embed_tokens\.|.*word_embeddings\.)")
HEAD = re.compile(r"^(?:output\.|(?:.*\.)?lm_head\.)")
# Heads that predict several tokens ahead are stored but not run.
MULTI_TOKEN = re.compile(r"(?:nextn|\bmtp\b|\.mtp\.)")


class Tensor(NamedTuple):
    """One stored tensor.

    Attributes:
        name: as in the file.
        format: weight format, lower case.
        weights: number of elements.
        stored_bytes: bytes of its data.
    """

    name: str
    format: str
    weights: int
    stored_bytes: int


@dataclass(slots=True)
class LayerTensors:
    """Sums over the tensors of one layer."""

    dense_bytes: int = 0
    dense_weights: int = 0
    dense_formats: Counter[str] = field(default_factory=Counter)
    expert_bytes: int = 0
    expert_weights: int = 0
    expert_formats: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class SortedTensors:
    """All tensors of a model, by the part that they belong to."""

    layers: dict[int, LayerTensors] = field(default_factory=dict)
    embed: LayerTensors = field(default_factory=LayerTensors)
    head: LayerTensors = field(default_factory=LayerTensors)
    rest_bytes: int = 0
    unused_bytes: int = 0


def is_routed(name: str) -> bool:
    """Tell whether a tensor belongs to a routed expert."""
    if "shared_expert" in name or "shexp" in name:
        return False
    patterns = (ROUTED_GGUF, ROUTED_GGUF_OLD, ROUTED_HF)
    return any(pattern.search(name) for pattern in patterns)


def sort_tensors(tensors: Iterable[Tensor], run_layers: int) -> SortedTensors:
    """Add tensors up by layer and part.

    Args:
        tensors: of all files of the model.
        run_layers: layers with this index or above hold multi-token heads.
    """
    parts = SortedTensors()

    for tensor in tensors:
        layer_match = LAYER.search(tensor.name)
        if layer_match and int(layer_match.group(1)) < run_layers:
            at = int(layer_match.group(1))
            if MULTI_TOKEN.search(tensor.name):
                parts.unused_bytes += tensor.stored_bytes
            else:
                _add(parts.layers.setdefault(at, LayerTensors()), tensor)
        elif layer_match or MULTI_TOKEN.search(tensor.name):
            parts.unused_bytes += tensor.stored_bytes
        elif EMBED.search(tensor.name):
            _add(parts.embed, tensor)
        elif HEAD.search(tensor.name):
            _add(parts.head, tensor)
        else:
            parts.rest_bytes += tensor.stored_bytes
    return parts


def _add(sums: LayerTensors, tensor: Tensor) -> None:
    if is_routed(tensor.name):
        sums.expert_bytes += tensor.stored_bytes
        sums.expert_weights += tensor.weights
        sums.expert_formats[tensor.format] += tensor.stored_bytes
    else:
        sums.dense_bytes += tensor.stored_bytes
        sums.dense_weights += tensor.weights
        sums.dense_formats[tensor.format] += tensor.stored_bytes

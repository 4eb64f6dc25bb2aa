"""What one model file holds, by layer: bytes that must be read, weights, formats.

Everything that predicts time or memory reads these classes; where the numbers came from
(a GGUF header, safetensors headers, a table of shapes) is one word of provenance.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.base.errors import AdviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moesim.traces.layer_kinds import Mixer


F16_BYTES = 2

# llama.cpp keeps windows, and entries of several tokens, in multiples of so many
# (`llama_kv_cache_iswa`, `llama_kv_cache_dsv4`).
CACHE_CELLS = 256


MOST_EXPERTS = 1 << 16
"""Traces number experts with 16 bits."""


@dataclass(frozen=True, slots=True)
class LayerContents:
    """One transformer layer.

    Attributes:
        dense_bytes: everything that every token reads: attention or its substitute,
            norms, gate, shared experts, dense feed-forward.
        dense_weights: number of weights in those bytes.
        dense_formats: weight format -> bytes of `dense_bytes`.
        experts: routed experts; 0 in a dense layer.
        zero_experts: choices of the gate beside `experts` that read nothing.
        top_k: choices per token.
        expert_bytes: all routed experts together.
        expert_weights: number of weights in those bytes.
        expert_formats: weight format -> bytes of `expert_bytes`.
        kv_bytes_per_token: key and value entries of one context token in half
            precision; 0 in a recurrent layer.
        window_tokens: attention looks back at most so far; 0 without a window.
        pooled_bytes: of the entry, in half precision, that several tokens of the whole
            context are compressed to, beside a window.
        pooled_tokens: so many tokens; 0 without such entries.
        waiting_bytes: of tokens that wait for the others of their entry.
        state_bytes: recurrent state of one sequence, read and written per token.
        attention_width: heads x (key + value size): multiply-adds per context token.
        query_group: query heads that share a key head; 1 where each has its own, or
            where latent attention has kernels of its own.
        latent_values: where one compressed entry serves all heads (MLA), values of
            one token that attention holds at once: of each head its query, as it was
            and with rotated part, absorbed, and both joined; 0 elsewhere.
    """

    dense_bytes: int
    dense_weights: int
    dense_formats: Mapping[str, int]
    experts: int = 0
    zero_experts: int = 0
    top_k: int = 0
    expert_bytes: int = 0
    expert_weights: int = 0
    expert_formats: Mapping[str, int] = field(default_factory=dict)
    kv_bytes_per_token: int = 0
    window_tokens: int = 0
    pooled_bytes: int = 0
    pooled_tokens: int = 0
    waiting_bytes: int = 0
    state_bytes: int = 0
    attention_width: int = 0
    query_group: int = 1
    latent_values: int = 0

    def __post_init__(self) -> None:
        """Refuse experts that no model can have."""
        # Both numbers come from files of others.
        if self.experts > MOST_EXPERTS:
            raise AdviceError(
                f"experts: expected up to {MOST_EXPERTS:,} in a layer, found"
                f" {self.experts:,}; is the file damaged?"
            )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise AdviceError(
                f"experts per token: expected 1..{self.experts}, as many as a layer"
                f" has, found {self.top_k}; is the file damaged?"
            )

    @property
    def active_share(self) -> float:
        """Share of the routed experts that one token reads."""
        choices = self.experts + self.zero_experts
        return self.top_k / choices if self.experts else 0.0

    @property
    def active_bytes(self) -> float:
        """Bytes of routed experts that one token reads."""
        return self.expert_bytes * self.active_share

    def kv_bytes(self, context_tokens: float) -> float:
        """Key and value bytes, in half precision, behind one token at this depth."""
        # Beyond a window nothing is read.
        window = self.window_tokens or context_tokens
        read = self.kv_bytes_per_token * min(context_tokens, window)
        if self.pooled_tokens:
            read += self.pooled_bytes * context_tokens / self.pooled_tokens
        return read


@dataclass(frozen=True, eq=False)
class ModelContents:
    """One model as stored.

    Attributes:
        name: of the file, folder or table entry.
        architecture: as its header says, such as ``qwen3moe``.
        layers: in order; only those that run when a token is made.
        embed_bytes: token embeddings, kept in host memory; one row is read per token.
        head_bytes: output head (the embeddings again where both are tied).
        head_weights: number of weights in the head.
        head_format: their weight format.
        hidden: H.
        source: ``gguf header``, ``safetensors header`` or ``shapes``.
        quant: the label that people use, such as ``Q4_K_M``.
        tied: head and embeddings are the same tensor.
        unused_bytes: stored, but not read when tokens are made (multi-token heads).
        table_bytes: look-up tables by token or n-gram besides the embeddings: a token
            reads a few rows, so engines may leave them in the file.
        table_weights: number of weights in those bytes.
        table_rows: rows of them that a token reads.
        assumed: what the source did not say.
    """

    name: str
    architecture: str
    layers: tuple[LayerContents, ...]
    embed_bytes: int
    head_bytes: int
    head_weights: int
    head_format: str
    hidden: int
    source: str
    quant: str = ""
    tied: bool = False
    unused_bytes: int = 0
    table_bytes: int = 0
    table_weights: int = 0
    table_rows: int = 1
    assumed: tuple[str, ...] = ()

    @cached_property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Whole numbers of all layers by name, int64 [L]."""
        names = [each.name for each in fields(LayerContents) if each.type == "int"]
        return {
            name: np.array([getattr(layer, name) for layer in self.layers], np.int64)
            for name in names
        }

    def kv_cache_bytes(self, context_tokens: int, micro_batch: int) -> np.ndarray:
        """Key and value bytes, in half precision, that llama.cpp keeps by layer for so
        much context, [L]: of a window also the tokens that are computed together.
        """
        layers = self.columns
        window = layers["window_tokens"]
        held = np.minimum(context_tokens, _cells(window + micro_batch))
        tokens = np.where(window > 0, held, context_tokens)
        pooled = np.maximum(1, layers["pooled_tokens"])
        entries = _cells(-(-context_tokens // pooled))
        kept = layers["kv_bytes_per_token"] * tokens
        return np.asarray(kept + layers["pooled_bytes"] * entries)

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of layers with routed experts, dense layers counted."""
        return tuple(at for at, layer in enumerate(self.layers) if layer.experts)

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes of all layers that every token reads, without the head."""
        return sum(layer.dense_bytes for layer in self.layers)

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(layer.expert_bytes for layer in self.layers)

    @cached_property
    def file_bytes(self) -> int:
        """Bytes of all tensors."""
        # A tied head is the embeddings again, stored once.
        head = 0 if self.tied else self.head_bytes
        weights = self.dense_bytes + self.expert_bytes
        stored = weights + head + self.embed_bytes
        return stored + self.unused_bytes + self.table_bytes

    @cached_property
    def weights(self) -> int:
        """Number of weights, embeddings, head and tables included."""
        in_layers = sum(
            layer.dense_weights + layer.expert_weights for layer in self.layers
        )
        tables = self.head_weights * (1 if self.tied else 2) + self.table_weights
        return in_layers + tables

    @cached_property
    def active_weights(self) -> float:
        """Weights that one token is multiplied with, the head included."""
        in_layers = sum(
            layer.dense_weights + layer.expert_weights * layer.active_share
            for layer in self.layers
        )
        return in_layers + self.head_weights

    @cached_property
    def expert_formats(self) -> Mapping[str, int]:
        """Weight format -> bytes of routed experts in it."""
        formats: Counter[str] = Counter()
        for layer in self.layers:
            formats.update(layer.expert_formats)
        return dict(formats.most_common())

    @property
    def main_format(self) -> str:
        """The format that most bytes of routed experts are in."""
        # Sorted by bytes, so the first one is the main one.
        return next(iter(self.expert_formats), self.head_format)

    def kv_bytes(self, context_tokens: float) -> float:
        """Bytes of keys and values, in half precision, behind one token at a depth."""
        return sum(layer.kv_bytes(context_tokens) for layer in self.layers)

    def renamed(self, name: str) -> ModelContents:
        """Return the same contents under another name."""
        return replace(self, name=name)


def _cells(entries: np.ndarray) -> np.ndarray:
    """Entries that caches of so many have room for."""
    return np.asarray(-(-entries // CACHE_CELLS) * CACHE_CELLS)


# What llama.cpp's --cpu-moe and --n-cpu-moe move, biases included.
ROUTED_GGUF = re.compile(r"ffn_(?:up|down|gate|gate_up)_(?:ch)?exps\.")
# Files from before 2024-04 hold one tensor per expert: blk.0.ffn_gate.7.weight.
ROUTED_GGUF_OLD = re.compile(r"ffn_(?:up|down|gate)\.\d+\.")
ROUTED_HF = re.compile(r"\.(?:experts|local_experts)\.")
LAYER = re.compile(r"(?:^blk|layers|blocks|h)\.(\d+)\.")

EMBED = re.compile(r"^(?:token_embd\.|.*embed_tokens\.|.*word_embeddings\.)")
# Looked up by token or n-gram for some layers: Gemma's and Qwen's "PLE".
TABLE = re.compile(r"per_layer_token_embd|embed_tokens_per_layer|ngram_embed")
HEAD = re.compile(r"^(?:output\.|(?:.*\.)?lm_head\.)")
VISION = re.compile(r"(?:^|\.)(?:visual|vision\w*|image\w*|audio\w*)\.")
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
    table_bytes: int = 0
    table_weights: int = 0


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
        if VISION.search(tensor.name):
            # Towers for pictures number their layers as the text's.
            parts.rest_bytes += tensor.stored_bytes
            continue
        if TABLE.search(tensor.name):
            parts.table_bytes += tensor.stored_bytes
            parts.table_weights += tensor.weights
            continue
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


def stored_contents(
    parts: SortedTensors, layers: Iterable[LayerContents], **more: Any
) -> ModelContents:
    """Return what a file holds, by its tensors; `more` are fields of the model."""
    # Tied models store no head of their own.
    tied = not parts.head.dense_bytes
    head = parts.embed if tied else parts.head
    return ModelContents(
        layers=tuple(layers),
        embed_bytes=parts.embed.dense_bytes,
        head_bytes=head.dense_bytes,
        head_weights=head.dense_weights,
        head_format=next(iter(head.dense_formats), "bf16"),
        tied=tied,
        # Tensors outside the layers (rope factors, the last norm) are small.
        unused_bytes=parts.unused_bytes + parts.rest_bytes,
        table_bytes=parts.table_bytes,
        table_weights=parts.table_weights,
        **more,
    )


def stored_layer(
    sums: LayerTensors, mixer: Mixer, experts: int, top_k: int, zero_experts: int = 0
) -> LayerContents:
    """Return one layer by its tensors, and by what their file says of it."""
    # Dense layers of a mixed model have no experts.
    routed = bool(sums.expert_bytes)
    return LayerContents(
        dense_bytes=sums.dense_bytes,
        dense_weights=sums.dense_weights,
        dense_formats=dict(sums.dense_formats),
        experts=experts if routed else 0,
        zero_experts=zero_experts,
        top_k=top_k if routed else 0,
        expert_bytes=sums.expert_bytes,
        expert_weights=sums.expert_weights,
        expert_formats=dict(sums.expert_formats),
        **context_sizes(mixer),
    )


def context_sizes(mixer: Mixer) -> dict[str, Any]:
    """What a layer keeps of its context, and computes with it, as `LayerContents` calls
    it.
    """
    return {
        "kv_bytes_per_token": mixer.kv_values * F16_BYTES,
        "window_tokens": mixer.window_tokens,
        "pooled_bytes": mixer.pooled_values * F16_BYTES,
        "pooled_tokens": mixer.pooled_tokens,
        "waiting_bytes": mixer.waiting_bytes,
        "state_bytes": mixer.state_bytes,
        "attention_width": mixer.attention_width,
        "query_group": mixer.query_group,
        "latent_values": mixer.latent_values,
    }


def _add(sums: LayerTensors, tensor: Tensor) -> None:
    if is_routed(tensor.name):
        sums.expert_bytes += tensor.stored_bytes
        sums.expert_weights += tensor.weights
        sums.expert_formats[tensor.format] += tensor.stored_bytes
    else:
        sums.dense_bytes += tensor.stored_bytes
        sums.dense_weights += tensor.weights
        sums.dense_formats[tensor.format] += tensor.stored_bytes

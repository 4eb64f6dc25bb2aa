"""What one model file holds, by layer: bytes that must be read, weights, formats.

Everything that predicts time or memory reads these classes; where the numbers came from
(a GGUF header, a ``config.json``, a table of shapes) is one word of provenance.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.errors import AdviceError
from moesim.traces.weight_formats import (
    Recipe,
    bytes_per_weight,
    more_bits,
    row_format,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.traces.layer_kinds import LayerShape, Mixer


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
        source: ``gguf header``, ``config.json`` or ``shapes``.
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


def _cells(entries: np.ndarray) -> np.ndarray:
    """Entries that caches of so many have room for."""
    return np.asarray(-(-entries // CACHE_CELLS) * CACHE_CELLS)


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


NORM_BYTES_PER_WEIGHT = 4


def shaped_contents(
    layers: Sequence[LayerShape],
    formats: Recipe,
    *,
    name: str,
    hidden: int,
    vocab: int,
    tied: bool,
) -> ModelContents:
    """Compute what a file of these layers holds in these formats."""
    count = len(layers)
    table_weights = vocab * hidden
    return ModelContents(
        name=name,
        architecture=name,
        layers=tuple(
            _shaped_layer(shape, hidden, formats, more=more_bits(at, count))
            for at, shape in enumerate(layers)
        ),
        embed_bytes=_stored(table_weights, formats.embed),
        head_bytes=_stored(table_weights, formats.head),
        head_weights=table_weights,
        head_format=formats.head,
        hidden=hidden,
        source="shapes",
        tied=tied,
    )


def _shaped_layer(
    shape: LayerShape, hidden: int, formats: Recipe, *, more: bool
) -> LayerContents:
    dense_format = row_format(formats.dense, hidden)
    dense_weights = shape.mixer.weights + shape.feed_forward
    # Gates and norms stay in single precision in GGUF files.
    dense_formats = {
        dense_format: _stored(dense_weights, dense_format),
        "f32": shape.exact * NORM_BYTES_PER_WEIGHT,
    }
    # Recipes give some layers more bits, see `more_bits`.
    down = row_format(
        formats.down_more if more else formats.down, shape.expert_intermediate
    )
    up = row_format(formats.up, shape.expert_hidden)
    matrix = shape.experts * shape.expert_hidden * shape.expert_intermediate
    expert_formats: Counter[str] = Counter()
    if shape.experts:
        expert_formats[up] += _stored((shape.matrices - 1) * matrix, up)
        expert_formats[down] += _stored(matrix, down)

    return LayerContents(
        dense_bytes=sum(dense_formats.values()),
        dense_weights=dense_weights + shape.exact,
        dense_formats=dense_formats,
        experts=shape.experts,
        zero_experts=shape.zero_experts,
        top_k=shape.top_k,
        expert_bytes=sum(expert_formats.values()),
        expert_weights=shape.matrices * matrix,
        expert_formats=dict(expert_formats),
        **context_sizes(shape.mixer),
    )


def _stored(weights: int, name: str) -> int:
    return round(weights * bytes_per_weight(name))

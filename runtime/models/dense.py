"""Everything of a model that is not a routed expert, with random weights: what the
device does between experts.

Per MoE layer: norm, query/key/value projections, attention over a growing key/value
cache, output projection, norm, gate with softmax and top-k (its choice is waited for
and thrown away: routing comes from a trace), and the shared expert where the model has
one. Once per step: the feed-forward of the layers without experts, and the output head
for the last position of each sequence. Every layer has weights of its own, so they come
from memory, as they do in the model.

Shape legend: T tokens, B sequences, Q tokens of each, C context, H hidden, E experts, K
experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from moesim.runtime.store.memory import huge_tensor
from torch.nn import functional

if TYPE_CHECKING:
    from moesim.traces.format.schema import ModelShape

_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class DenseSizes:
    """Widths of the dense part. Where a shape does not know its attention, four H x H
    matrices are assumed.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    layers: int
    shared: int
    dense_layers: int
    dense_width: int
    vocab: int

    @classmethod
    def of(cls, shape: ModelShape) -> DenseSizes:
        """Read them off a model's shape."""
        heads = 1
        kv_heads = 1
        head_dim = shape.hidden
        if shape.heads and shape.head_dim:
            heads = shape.heads
            kv_heads = shape.kv_heads or shape.heads
            head_dim = shape.head_dim
        return cls(
            shape.hidden,
            heads,
            kv_heads,
            head_dim,
            shape.experts,
            shape.top_k,
            shape.layers,
            shape.shared_intermediate,
            len(shape.dense_layers),
            shape.dense_intermediate,
            shape.vocab,
        )

    @property
    def attention(self) -> int:
        """Weights of one attention block."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def weights(self) -> int:
        """All of them; the embedding counts although only rows of it are read (the
        costs count it, too).
        """
        layer = self.attention + self.hidden * (self.experts + 3 * self.shared)
        dense = self.dense_layers * (
            self.attention + 3 * self.hidden * self.dense_width
        )
        return self.layers * layer + dense + 2 * self.vocab * self.hidden


class _Layer(NamedTuple):
    """Weights [out, in] of one MoE layer's dense part; `up` and `down` of its shared
    expert.
    """

    qkv: torch.Tensor
    out: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor | None


class DenseStack:
    """The dense part of all layers, and its key/value cache.

    Args:
        sizes: widths.
        dtype: of weights and activations.
        device: where it computes.
        seed: of the weights.
    """

    def __init__(
        self, sizes: DenseSizes, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> None:
        self.sizes = sizes
        self._dtype = dtype
        self._device = device
        self._draws = torch.Generator(device).manual_seed(seed)
        width = sizes.heads * sizes.head_dim
        kv_width = sizes.kv_heads * sizes.head_dim
        shared = sizes.shared
        self._layers = [
            _Layer(
                self._draw(width + 2 * kv_width, sizes.hidden),
                self._draw(sizes.hidden, width),
                self._draw(sizes.experts, sizes.hidden),
                self._draw(2 * shared, sizes.hidden) if shared else None,
                self._draw(sizes.hidden, shared) if shared else None,
            )
            for _ in range(sizes.layers)
        ]
        self._dense = [
            (
                self._draw(2 * width, sizes.hidden),
                self._draw(sizes.hidden, width),
                self._draw(2 * sizes.dense_width, sizes.hidden),
                self._draw(sizes.hidden, sizes.dense_width),
            )
            for _ in range(sizes.dense_layers)
        ]
        self._head = self._draw(sizes.vocab, sizes.hidden) if sizes.vocab else None
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._room = (0, 0)

    @property
    def bytes(self) -> int:
        """Bytes of all weights, the key/value cache not counted."""
        tensors = [w for layer in self._layers for w in layer if w is not None]
        tensors += [w for layer in self._dense for w in layer] + (
            [] if self._head is None else [self._head]
        )
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def embed(self, tokens: int) -> torch.Tensor:
        """Draw hidden states [T, H] that a step begins with."""
        drawn = torch.randn(
            tokens, self.sizes.hidden, generator=self._draws, device=self._device
        )
        return drawn.to(self._dtype)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the key/value cache."""
        return sum(
            tensor.numel() * tensor.itemsize for pair in self._kept for tensor in pair
        )

    def make_room(self, sequences: int, context: int) -> None:
        """Have a written key/value cache for so many sequences and positions; called
        before a run.
        """
        if sequences <= self._room[0] and context <= self._room[1]:
            return
        self._room = max(sequences, self._room[0]), max(context, self._room[1])
        sizes = self.sizes
        shape = (self._room[0], sizes.kv_heads, self._room[1], sizes.head_dim)
        self._kept = []
        for _ in range(sizes.layers):
            self._kept.append((self._draw(*shape), self._draw(*shape)))

    def layer(
        self, index: int, hidden: torch.Tensor, sequences: int, context: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one layer's dense part.

        Args:
            index: MoE layer.
            hidden: [T, H], tokens of the sequences one after the other.
            sequences: B; where T is no multiple of it, the last rows are padded.
            context: C, own tokens included.

        Returns:
            The residual stream [T, H], to which the experts' answers are added, and its
            norm [T, H], about which gate and experts are asked.
        """
        weights = self._layers[index]
        sizes = self.sizes
        normed = functional.rms_norm(hidden, (sizes.hidden,))
        width = sizes.heads * sizes.head_dim
        kv_width = sizes.kv_heads * sizes.head_dim
        query, key, value = functional.linear(normed, weights.qkv).split(
            (width, kv_width, kv_width), dim=1
        )
        each = -(-len(hidden) // sequences)
        parts = [
            self._by_head(part, sequences, each, heads)
            for part, heads in (
                (query, sizes.heads),
                (key, sizes.kv_heads),
                (value, sizes.kv_heads),
            )
        ]
        keys, values = (kept[:sequences, :, :context] for kept in self._kept[index])
        keys[:, :, context - each :], values[:, :, context - each :] = (
            parts[1],
            parts[2],
        )
        attended = functional.scaled_dot_product_attention(
            parts[0],
            keys,
            values,
            is_causal=1 < each == context,
            enable_gqa=sizes.heads != sizes.kv_heads,
        )
        joined = attended.transpose(1, 2).reshape(sequences * each, width)[
            : len(hidden)
        ]
        hidden = hidden + functional.linear(joined, weights.out)
        normed = functional.rms_norm(hidden, (sizes.hidden,))
        chosen = torch.topk(
            functional.linear(normed, weights.gate).float().softmax(-1), sizes.top_k
        ).indices
        # nobody reads it, but nobody plans before a gate has spoken: a GPU is waited
        # for here
        chosen.cpu()
        if weights.up is not None and weights.down is not None:
            hidden = hidden + _feed_forward(normed, weights.up, weights.down)
        return hidden, normed

    def head(self, hidden: torch.Tensor, sequences: int) -> None:
        """Compute what happens once per step: layers without experts, then logits of
        each sequence's last token.
        """
        for qkv, out, up, down in self._dense:
            mixed = functional.linear(
                functional.rms_norm(hidden, (self.sizes.hidden,)), qkv
            )[:, : out.shape[1]]
            hidden = hidden + functional.linear(mixed, out)
            hidden = hidden + _feed_forward(
                functional.rms_norm(hidden, (self.sizes.hidden,)), up, down
            )
        if self._head is not None:
            functional.linear(hidden[-sequences:], self._head).argmax(-1)

    def _by_head(
        self, rows: torch.Tensor, sequences: int, each: int, heads: int
    ) -> torch.Tensor:
        """Lay rows [T, heads * d] out as [B, heads, Q, d]."""
        missing = sequences * each - len(rows)
        padded = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        return padded.view(sequences, each, heads, self.sizes.head_dim).transpose(1, 2)

    def _draw(self, *shape: int) -> torch.Tensor:
        if self._device.type == "cpu":
            drawn = huge_tensor(shape, self._dtype)
        else:
            drawn = torch.empty(shape, dtype=self._dtype, device=self._device)
        return drawn.normal_(std=_SPREAD, generator=self._draws)


def _feed_forward(
    hidden: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    gate, lifted = functional.linear(hidden, up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * lifted, down)

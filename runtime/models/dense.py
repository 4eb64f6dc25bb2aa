"""The dense part of a model, everything but its routed experts, with random weights.

Per MoE layer: norm, query/key/value projections, attention over a growing key/value
cache, output projection, norm, gate with softmax and top-k (its choice is waited for
and thrown away: routing comes from a trace), and the shared expert where the model has
one. Once per step: the feed-forward of the layers without experts, and the output head
for the last position of each sequence. Every layer has weights of its own, so they come
from memory, as they do in the model.

Shape legend: T tokens, B sequences, Q tokens of each, C context, H hidden, E experts, K
experts per token, D width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.nn import functional

from moesim.runtime.store.memory import huge_tensor

if TYPE_CHECKING:
    from moesim.traces.format.schema import ModelShape

# Small, so that numbers stay finite through any number of layers.
_STANDARD_DEVIATION: Final = 0.02


class _MoeLayer(NamedTuple):
    """Weights [out, in] of one MoE layer's dense part; `up` and `down` of its shared
    expert.
    """

    qkv: torch.Tensor
    out: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor | None


class _DenseLayer(NamedTuple):
    """Weights [out, in] of a layer without experts."""

    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class DenseStack:
    """The dense part of all layers, and its key/value cache.

    Args:
        shape: of the model; windows and recurrences are computed as full attention.
        dtype: of weights and activations.
        device: where it computes.
        seed: of the weights.
    """

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> None:
        self.shape = shape
        self._heads, self._kv_heads, self._head_dim = shape.attention
        self._dtype = dtype
        self._device = device
        self._draws = torch.Generator(device).manual_seed(seed)
        self._width = self._heads * self._head_dim
        self._kv_width = self._kv_heads * self._head_dim

        # The order of these draws decides the weights: keep it.
        self._layers = [self._draw_moe_layer() for _ in range(shape.layers)]
        self._dense = [self._draw_dense_layer() for _ in shape.dense_layers]
        self._head = self._draw(shape.vocab, shape.hidden) if shape.vocab else None

        # Per MoE layer, keys and values [B, heads, C, D]; empty until their extent is
        # known.
        self._kv_cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sequences = 0
        self._context = 0

    @property
    def bytes(self) -> int:
        """Bytes of all weights, the key/value cache not counted."""
        tensors = [w for layer in self._layers for w in layer if w is not None]
        tensors += [w for dense_layer in self._dense for w in dense_layer]
        if self._head is not None:
            tensors.append(self._head)
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def embed(self, tokens: int) -> torch.Tensor:
        """Draw hidden states [T, H] that a step begins with."""
        hidden = torch.randn(
            tokens, self.shape.hidden, generator=self._draws, device=self._device
        )
        return hidden.to(self._dtype)

    def allocate_cache(self, sequences: int, context: int) -> None:
        """Have a written key/value cache for so many sequences and positions; called
        before a run.
        """
        if sequences <= self._sequences and context <= self._context:
            return
        self._sequences = max(sequences, self._sequences)
        self._context = max(context, self._context)

        # The old cache goes first: both together might not fit.
        self._kv_cache = []
        extent = (self._sequences, self._kv_heads, self._context, self._head_dim)
        for _ in range(self.shape.layers):
            # Written, since unwritten memory is read from one zero page.
            keys = self._draw(*extent)
            values = self._draw(*extent)
            self._kv_cache.append((keys, values))

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
            The residual stream [T, H], to which the experts' results are added, and its
            norm [T, H], which is the input of gate and experts.
        """
        weights = self._layers[index]
        attended = self._attend(index, hidden, sequences, context)
        hidden = hidden + functional.linear(attended, weights.out)
        normed = self._norm(hidden)

        scores = functional.linear(normed, weights.gate).float().softmax(-1)
        chosen = torch.topk(scores, self.shape.top_k).indices
        # The choice is not used, but planning needs a gate's answer on the host: a GPU
        # is waited for here.
        chosen.cpu()

        if weights.up is not None and weights.down is not None:
            hidden = hidden + _feed_forward(normed, weights.up, weights.down)
        return hidden, normed

    def gates(self, index: int, count: int, normed: torch.Tensor) -> None:
        """Ask the gates of `count` layers that follow one, on its own input [T, H]."""
        for weights in self._layers[index + 1 : index + 1 + count]:
            functional.linear(normed, weights.gate).float().softmax(-1)

    def head(self, hidden: torch.Tensor, sequences: int) -> None:
        """Compute what happens once per step: layers without experts, then logits of
        each sequence's last token.
        """
        for layer in self._dense:
            # Their attention is reduced to its projections: the cache holds no keys and
            # values for them.
            projected = functional.linear(self._norm(hidden), layer.qkv)
            mixed = projected[:, : layer.out.shape[1]]
            hidden = hidden + functional.linear(mixed, layer.out)
            hidden = hidden + _feed_forward(self._norm(hidden), layer.up, layer.down)

        if self._head is not None:
            functional.linear(hidden[-sequences:], self._head).argmax(-1)

    def _attend(
        self, index: int, hidden: torch.Tensor, sequences: int, context: int
    ) -> torch.Tensor:
        """Attend over the cache, into which the new keys and values are written; return
        [T, heads * D].
        """
        weights = self._layers[index]
        query, key, value = functional.linear(self._norm(hidden), weights.qkv).split(
            (self._width, self._kv_width, self._kv_width), dim=1
        )

        # Rounded up: in a ragged prefill the last sequence is the shorter one.
        each = -(-len(hidden) // sequences)
        queries = self._by_head(query, sequences, each, self._heads)
        keys, values = (
            tensor[:sequences, :, :context] for tensor in self._kv_cache[index]
        )
        first = context - each
        keys[:, :, first:] = self._by_head(key, sequences, each, self._kv_heads)
        values[:, :, first:] = self._by_head(value, sequences, each, self._kv_heads)

        if each == 1:
            # Heads that share keys are rows of one product: the keys are read once for
            # all of them, where torch on a host reads them for each.
            shared = queries.reshape(sequences, self._kv_heads, -1, self._head_dim)
            attended = functional.scaled_dot_product_attention(shared, keys, values)
            return attended.reshape(sequences, self._width)

        attended = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            # Causal only in a prefill, which has no context before it.
            is_causal=each == context,
            enable_gqa=self._heads != self._kv_heads,
        )
        rows = attended.transpose(1, 2).reshape(sequences * each, self._width)
        return rows[: len(hidden)]

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, (self.shape.hidden,))

    def _by_head(
        self, rows: torch.Tensor, sequences: int, each: int, heads: int
    ) -> torch.Tensor:
        """Lay rows [T, heads * D] out as [B, heads, Q, D]."""
        missing = sequences * each - len(rows)
        padded = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        return padded.view(sequences, each, heads, self._head_dim).transpose(1, 2)

    def _draw_moe_layer(self) -> _MoeLayer:
        hidden = self.shape.hidden
        qkv = self._draw(self._width + 2 * self._kv_width, hidden)
        out = self._draw(hidden, self._width)
        gate = self._draw(self.shape.experts, hidden)
        width = self.shape.shared_intermediate
        if not width:
            return _MoeLayer(qkv, out, gate, up=None, down=None)
        up = self._draw(2 * width, hidden)
        down = self._draw(hidden, width)
        return _MoeLayer(qkv, out, gate, up, down)

    def _draw_dense_layer(self) -> _DenseLayer:
        hidden = self.shape.hidden
        width = self.shape.dense_intermediate
        return _DenseLayer(
            qkv=self._draw(2 * self._width, hidden),
            out=self._draw(hidden, self._width),
            up=self._draw(2 * width, hidden),
            down=self._draw(hidden, width),
        )

    def _draw(self, *shape: int) -> torch.Tensor:
        if self._device.type == "cpu":
            tensor = huge_tensor(shape, self._dtype)
        else:
            tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor.normal_(std=_STANDARD_DEVIATION, generator=self._draws)


def _feed_forward(
    hidden: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Apply a SwiGLU network; `up` holds gate and up one above the other."""
    gate, lifted = functional.linear(hidden, up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * lifted, down)

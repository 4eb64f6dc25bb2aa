"""Measures one layer without its experts: norms, projections, attention, gate.

Run at several hidden sizes and token counts and fitted with the same roofline that the
costs use, so that its constants mean there what they mean here.

Shape legend: T tokens, H hidden, C context, E experts, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.nn import functional

from moesim.hwprofiles.calibration.fit_curves import fit_roofline
from moesim.runtime.measure.pool_size import pool_bytes
from moesim.runtime.measure.timing import Timer, once_s, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from moesim.runtime.measure.measurements import Measurements

HEAD_DIM: Final = 64
EXPERTS: Final = 64
TOP_K: Final = 8
CONTEXT: Final = 128

# Narrow layers are small: more of them would fill a pool, and take minutes to make.
_MOST_LAYERS: Final = 64
_STANDARD_DEVIATION: Final = 0.02


class DenseLayer(NamedTuple):
    """Weights [out, in] and keys/values [heads, C, 64] of one layer."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    norm: torch.Tensor

    @classmethod
    def of(cls, hidden: int, dtype: torch.dtype, device: torch.device) -> DenseLayer:
        """Draw one."""

        def draw(*shape: int) -> torch.Tensor:
            drawn = torch.randn(*shape, device=device)
            return drawn.mul_(_STANDARD_DEVIATION).to(dtype)

        kv_shape = (hidden // HEAD_DIM, CONTEXT, HEAD_DIM)
        return cls(
            qkv=draw(3 * hidden, hidden),
            out=draw(hidden, hidden),
            gate=draw(EXPERTS, hidden),
            keys=draw(*kv_shape),
            values=draw(*kv_shape),
            norm=draw(hidden),
        )

    def copy(self) -> DenseLayer:
        """Return the same layer in other memory."""
        return DenseLayer(*(tensor.clone() for tensor in self))

    @property
    def params(self) -> int:
        """Weights read once per step."""
        return int(self.qkv.numel() + self.out.numel() + self.gate.numel())

    @property
    def bytes(self) -> int:
        """Bytes read once per step: weights, keys and values."""
        elements = self.params + self.keys.numel() + self.values.numel()
        return int(elements) * int(self.qkv.itemsize)

    def flops(self, tokens: int) -> float:
        """Multiply-adds count twice, for weights and for attention over the context."""
        width = int(self.out.shape[0])
        # Attention has two products with C keys or values of the same width.
        return 2.0 * self.params * tokens + 4.0 * width * tokens * CONTEXT

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Attend, choose experts, and return the next hidden states [T, H]."""
        width = self.out.shape[0]
        normed = functional.rms_norm(hidden, (width,), self.norm)
        query = functional.linear(normed, self.qkv)[:, :width]
        queries = query.view(-1, width // HEAD_DIM, HEAD_DIM).transpose(0, 1)
        attended = functional.scaled_dot_product_attention(
            queries, self.keys, self.values
        )
        rows = attended.transpose(0, 1).reshape(-1, width)
        joined = hidden + functional.linear(rows, self.out)

        # The choice is computed, since it costs time, and then not used.
        normed = functional.rms_norm(joined, (width,), self.norm)
        scores = functional.linear(normed, self.gate)
        torch.topk(torch.softmax(scores.float(), dim=-1), TOP_K)
        return joined


def measure_dense(
    measurements: Measurements,
    dtype: torch.dtype,
    *,
    widths: Sequence[int],
    tokens: Sequence[int],
    seconds: float,
    device: str = "cpu",
    once: Timer = once_s,
    source: str,
) -> None:
    """Measure layers of several hidden sizes at several token counts, weights from
    memory each time.

    Args:
        measurements: receive ``costs.dense``.
        dtype: of weights and hidden states.
        widths: hidden sizes.
        tokens: counts.
        seconds: to spend.
        device: where it computes.
        once: its clock.
        source: how it was measured, in words.
    """
    share_s = seconds / (len(widths) * len(tokens))
    where = torch.device(device)
    moved_bytes: list[float] = []
    flops: list[float] = []
    times: list[np.ndarray] = []
    for width in widths:
        first = DenseLayer.of(width, dtype, where)
        # Enough layers that the caches hold none of them when its turn comes again.
        count = max(2, min(_MOST_LAYERS, pool_bytes() // first.bytes))
        layers = [first, *(first.copy() for _ in range(count - 1))]
        for rows in tokens:
            hidden = torch.randn(rows, width, device=where).to(dtype)
            moved_bytes.append(first.bytes)
            flops.append(first.flops(rows))
            times.append(sample(_in_turn(layers, hidden), share_s, once=once))

    measurements.roofline(
        "dense",
        fit_roofline(moved_bytes, flops, times),
        f"roofline through dense layers of width {', '.join(map(str, widths))} at"
        f" {', '.join(map(str, tokens))} tokens over a context of {CONTEXT}, {source}",
    )


def _in_turn(
    layers: list[DenseLayer], hidden: torch.Tensor
) -> Callable[[int], torch.Tensor]:
    """Return operation number i: the next layer, round and round."""
    return lambda index: layers[index % len(layers)].forward(hidden)

"""One layer without its experts: norms, projections, attention over a context, gate.

Run at several hidden sizes and token counts and fitted with the same roofline that the
costs use, so that its constants mean there what they mean here.

Shape legend: T tokens, H hidden, C context, E experts, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from moesim.hwprofiles.calibration.fit_curves import fit_roofline
from moesim.runtime.measure.experts import pool_bytes
from moesim.runtime.measure.timing import Findings, once_s, sample
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

HEAD_DIM: Final = 64
EXPERTS = 64
TOP_K = 8
CONTEXT = 128
_MOST_LAYERS: Final = 64


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
        heads = hidden // HEAD_DIM

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device).mul_(0.02).to(dtype)

        kept = (heads, CONTEXT, HEAD_DIM)
        weights = draw(3 * hidden, hidden), draw(hidden, hidden), draw(EXPERTS, hidden)
        return cls(*weights, draw(*kept), draw(*kept), draw(hidden))

    @property
    def params(self) -> int:
        """Weights read once per step."""
        return int(self.qkv.numel() + self.out.numel() + self.gate.numel())

    @property
    def bytes(self) -> int:
        """Bytes read once per step: weights, keys and values."""
        return int(self.params + self.keys.numel() + self.values.numel()) * int(
            self.qkv.itemsize
        )

    def flops(self, tokens: int) -> float:
        """Multiply-adds count twice, for weights and for attention over the context."""
        return (
            2.0 * self.params * tokens + 4.0 * int(self.out.shape[0]) * tokens * CONTEXT
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Attend, choose experts, and return the next hidden states [T, H]."""
        width = self.out.shape[0]
        normed = functional.rms_norm(hidden, (width,), self.norm)
        query = functional.linear(normed, self.qkv)[:, :width]
        heads = query.view(-1, width // HEAD_DIM, HEAD_DIM).transpose(0, 1)
        attended = functional.scaled_dot_product_attention(
            heads, self.keys, self.values
        )
        joined = hidden + functional.linear(
            attended.transpose(0, 1).reshape(-1, width), self.out
        )
        scores = functional.linear(
            functional.rms_norm(joined, (width,), self.norm), self.gate
        )
        torch.topk(torch.softmax(scores.float(), dim=-1), TOP_K)
        return joined


def measure_dense(
    findings: Findings,
    dtype: torch.dtype,
    *,
    widths: Sequence[int],
    tokens: Sequence[int],
    seconds: float,
    device: str = "cpu",
    once: Callable[[Callable[[int], object], int], float] = once_s,
    source: str,
) -> None:
    """Measure layers of several hidden sizes at several token counts, weights from
    memory each time.
    """
    share_s = seconds / (len(widths) * len(tokens))
    where = torch.device(device)
    moved: list[float] = []
    flops: list[float] = []
    times: list[np.ndarray] = []
    for width in widths:
        first = DenseLayer.of(width, dtype, where)
        count = max(2, min(_MOST_LAYERS, pool_bytes() // first.bytes))
        layers = [
            first,
            *(
                DenseLayer(*(tensor.clone() for tensor in first))
                for _ in range(count - 1)
            ),
        ]
        for rows in tokens:
            hidden = torch.randn(rows, width, device=where).to(dtype)
            moved.append(first.bytes)
            flops.append(first.flops(rows))
            times.append(sample(_turns(layers, hidden), share_s, once=once))
    findings.roofline(
        "dense",
        fit_roofline(moved, flops, times),
        f"roofline through dense layers of width {', '.join(map(str, widths))} at"
        f" {', '.join(map(str, tokens))} tokens over a context of {CONTEXT}, {source}",
    )


def _turns(
    layers: list[DenseLayer], hidden: torch.Tensor
) -> Callable[[int], torch.Tensor]:
    return lambda index: layers[index % len(layers)].forward(hidden)

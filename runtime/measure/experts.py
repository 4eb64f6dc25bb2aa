"""Measures compute on the CPU, the host accelerator or a GPU: experts, and one layer
without them (norms, projections, attention, gate).

Weights lie in a pool several times larger than the caches, written once, and each run
takes the next ones: decode reads every weight from memory, so a benchmark that does not
is a different benchmark. Several sizes are fitted with the same roofline that the costs
use, so that its constants mean there what they mean here.

T tokens, H hidden, C context, E experts, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from moesim.hwprofiles.calibration.fit_curves import Points, fit_roofline
from moesim.hwprofiles.dense_costs import DenseSizes
from moesim.hwprofiles.schema import ReferenceExpert
from moesim.runtime.accelerators import HOST, caches_bytes
from moesim.runtime.measure.sampling import event_timer, once_s, pool_bytes, sample
from moesim.runtime.models.dense import DenseStack
from moesim.runtime.models.expert_layout import (
    ExpertLayout,
    dtype_name,
    expert_forward,
    swiglu_layout,
)
from moesim.runtime.store.memory import DeviceSlots
from moesim.traces.format.schema import ModelShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.runtime.accelerators import Accelerator
    from moesim.runtime.measure.sampling import Measurements


# Of random weights: products stay finite.
_STANDARD_DEVIATION: Final = 0.02

# H F below which overhead hides everything else.
_SMALL_WEIGHTS: Final = 1 << 18

# Experts of a layer between which the first one is compared.
_LAYER_EXPERTS: Final = 4
_FEWEST_LAYERS: Final = 15


class Size(NamedTuple):
    """An expert's hidden H and intermediate F."""

    hidden: int
    intermediate: int

    def companion(self) -> Size:
        """Another expert, a quarter of the bytes (or sixteen times, if small): two
        sizes separate overhead from bandwidth.
        """
        if self.hidden * self.intermediate >= _SMALL_WEIGHTS:
            return Size(self.hidden // 2, self.intermediate // 2)
        return Size(self.hidden * 4, self.intermediate * 4)


class ExpertPool:
    """Many experts of one size in written memory.

    Args:
        size: H and F.
        dtype: of the weights.
        accelerator: in whose memory they are.
        total_bytes: to cycle through; several times the caches when None.
    """

    def __init__(
        self,
        size: Size,
        dtype: torch.dtype,
        *,
        accelerator: Accelerator = HOST,
        total_bytes: int | None = None,
    ) -> None:
        self.size = size
        self.dtype = dtype
        self.layout: ExpertLayout = swiglu_layout(size.hidden, size.intermediate, dtype)
        expert_bytes = self.layout.expert_bytes
        self.device = accelerator.device
        total_bytes = total_bytes or pool_bytes(accelerator, expert_bytes)
        count = max(2, total_bytes // expert_bytes)
        self.slots = DeviceSlots(count, expert_bytes, self.device)

        # One draw for all: equal weights cost what others do, and drawing is slow.
        weights = torch.randn(expert_bytes // dtype.itemsize, device=self.device)
        raw = weights.mul_(_STANDARD_DEVIATION).to(dtype).view(torch.uint8)
        for slot in range(count):
            self.slots.record(slot)[: len(raw)].copy_(raw)
        self._weights = [self.slots.weights(slot, self.layout) for slot in range(count)]

    @property
    def reference(self) -> ReferenceExpert:
        """Describe the expert as a profile does."""
        return ReferenceExpert(
            self.size.hidden,
            self.size.intermediate,
            self.layout.expert_bytes,
            dtype_name(self.dtype),
        )

    def work(self, tokens: int) -> Callable[[int], torch.Tensor]:
        """Return operation number i: expert ``i`` of the pool for `tokens` tokens."""
        drawn = torch.randn(tokens, self.size.hidden, device=self.device)
        hidden = drawn.to(self.dtype)
        weights = self._weights
        layout = self.layout
        count = len(weights)
        return lambda index: expert_forward(weights[index % count], hidden, layout)

    def close(self) -> None:
        """Give the memory back."""
        self._weights.clear()
        self.slots.close()


def choose_dtype(size: Size, *, seconds: float) -> torch.dtype:
    """Choose the weights' type that this CPU does well: bfloat16 if faster at 1 and at
    16 tokens, else float32.

    A CPU without bfloat16 products reads half the bytes and then converts them, which
    loses with more tokens.
    """
    medians = {}
    for dtype in (torch.float32, torch.bfloat16):
        pool = ExpertPool(size, dtype)
        medians[dtype] = [
            float(np.median(sample(pool.work(tokens), seconds / 4)))
            for tokens in (1, 16)
        ]
        pool.close()

    pairs = zip(medians[torch.bfloat16], medians[torch.float32], strict=True)
    faster = all(bfloat16_s < float32_s for bfloat16_s, float32_s in pairs)
    return torch.bfloat16 if faster else torch.float32


def measure_experts(
    measurements: Measurements,
    lane: str,
    size: Size,
    dtype: torch.dtype,
    *,
    tokens: Sequence[int],
    seconds: float,
    accelerator: Accelerator = HOST,
    source: str,
) -> None:
    """Measure an expert by tokens, and a second one of another size, for the roofline
    between them.

    Args:
        measurements: receive ``costs.<lane>``.
        lane: ``cpu`` or ``gpu``.
        size: of the expert.
        dtype: of its weights.
        tokens: counts to measure, ascending.
        seconds: to spend.
        accelerator: that computes, timed by its own clock.
        source: how it was measured, in words.
    """
    # The companion serves the roofline only, so four or five counts are enough.
    some_tokens = tokens[:: max(1, len(tokens) // 4)]
    share_s = seconds / (len(tokens) + len(some_tokens))
    companion = size.companion()
    once = event_timer(accelerator)
    moved_bytes: list[float] = []
    flops: list[float] = []
    times: list[np.ndarray] = []
    for expert, counts in ((size, tokens), (companion, some_tokens)):
        pool = ExpertPool(expert, dtype, accelerator=accelerator)
        by_tokens = {
            count: sample(pool.work(count), share_s, once=once) for count in counts
        }
        for count, samples in by_tokens.items():
            moved_bytes.append(pool.layout.expert_bytes)
            # Three products of H F weights, a multiplication and an addition each.
            flops.append(6.0 * expert.hidden * expert.intermediate * count)
            times.append(samples)
        if expert == size:
            measurements.points(
                lane,
                by_tokens,
                pool.reference,
                f"one {dtype_name(dtype)} SwiGLU expert, {source}",
            )
        pool.close()

    measurements.roofline(
        lane,
        fit_roofline(moved_bytes, flops, Points.single(times)),
        f"roofline through {dtype_name(dtype)} experts of {size.hidden} x"
        f" {size.intermediate} and {companion.hidden} x {companion.intermediate},"
        f" {source}",
    )


def measure_first_expert(
    measurements: Measurements,
    size: Size,
    dtype: torch.dtype,
    *,
    seconds: float,
    source: str,
) -> None:
    """Measure by how much the first CPU expert of a layer is slower than the next
    three.

    Between layers the core does other things: here, a pass over as many bytes as its
    caches hold.
    """
    pool = ExpertPool(size, dtype)
    work = pool.work(1)
    between_layers = torch.zeros(caches_bytes() // 8, dtype=torch.int64)

    def extra_s(_: Callable[[int], object], index: int) -> float:
        between_layers.add_(1)
        first = _LAYER_EXPERTS * index
        times = [once_s(work, first + number) for number in range(_LAYER_EXPERTS)]
        # Noise may make the first one the fastest; a cost is not negative.
        return max(0.0, times[0] - float(np.mean(times[1:])))

    samples = sample(lambda _: None, seconds, fewest=_FEWEST_LAYERS, once=extra_s)
    pool.close()
    measurements.number(
        "costs.cpu.first_s",
        samples,
        f"first of four experts minus the mean of the others, {source}",
    )


CONTEXT: Final = 128
_HEAD_DIM: Final = 64

# Narrow layers are small, and each has six tensors to make.
_MOST_LAYERS: Final = 1024


class DenseWidth(NamedTuple):
    """Layers of one hidden size, as runs compute them."""

    hidden: int

    def shape(self, layers: int) -> ModelShape:
        """So many layers: as many keys as queries, 64 experts, no shared one."""
        heads = self.hidden // _HEAD_DIM
        return ModelShape(
            name="dense",
            layers=layers,
            experts=64,
            top_k=8,
            hidden=self.hidden,
            # Experts have no part in it.
            expert_intermediate=1,
            expert_bytes=(1,) * layers,
            other_bytes=0,
            heads=heads,
            kv_heads=heads,
            head_dim=_HEAD_DIM,
        )

    @property
    def params(self) -> int:
        """Weights of one layer, read once per step."""
        return DenseSizes.of(self.shape(1)).all_params

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes read once per step: weights, keys and values."""
        return (self.params + 2 * self.hidden * CONTEXT) * dtype.itemsize

    def flops(self, tokens: int) -> float:
        """Multiply-adds count twice, for weights and for attention over the context."""
        # Attention has two products with C keys or values of the same width.
        return 2.0 * self.params * tokens + 4.0 * self.hidden * tokens * CONTEXT


def measure_dense(
    measurements: Measurements,
    dtype: torch.dtype,
    *,
    widths: Sequence[int],
    tokens: Sequence[int],
    seconds: float,
    accelerator: Accelerator = HOST,
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
        accelerator: that computes, timed by its own clock.
        source: how it was measured, in words.
    """
    share_s = seconds / (len(widths) * len(tokens))
    once = event_timer(accelerator)
    total_bytes = pool_bytes(accelerator)
    moved_bytes: list[float] = []
    flops: list[float] = []
    times: list[np.ndarray] = []
    for width in map(DenseWidth, widths):
        layer_bytes = width.bytes(dtype)
        # Enough layers that the caches hold none of them when its turn comes again.
        count = max(2, min(_MOST_LAYERS, total_bytes // layer_bytes))
        stack = DenseStack(width.shape(count), dtype, accelerator.device)
        stack.allocate_cache(1, CONTEXT)
        for rows in tokens:
            moved_bytes.append(layer_bytes)
            flops.append(width.flops(rows))
            work = _in_turn(stack, stack.embed(rows))
            times.append(sample(work, share_s, once=once))

    measurements.roofline(
        "dense",
        fit_roofline(moved_bytes, flops, Points.single(times)),
        f"roofline through dense layers of width {', '.join(map(str, widths))} at"
        f" {', '.join(map(str, tokens))} tokens over a context of {CONTEXT}, {source}",
    )


def _in_turn(stack: DenseStack, hidden: torch.Tensor) -> Callable[[int], object]:
    """Return operation number i: the next layer, round and round."""
    layers = stack.shape.layers
    return lambda index: stack.layer(index % layers, hidden, 1, CONTEXT)

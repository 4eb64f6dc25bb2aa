"""Seconds of what is not a routed expert: a layer's dense part, and the head of a step.

The dense part of a layer is attention, norms, gate and shared experts. The head is what
happens once per step: embedding, feed-forward of dense layers, output projection.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.hwprofiles.paths import ATTENTION_BYTES_PER_S, DENSE, HEAD
from moesim.hwprofiles.roofline import MeasuredPart, RooflineModel, flops_per_token
from moesim.hwprofiles.schema import ReferenceExpert

if TYPE_CHECKING:
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.traces.format.schema import ModelShape

_WIDE_DTYPES = {"f32", "fp32", "float32"}
"""Spellings of the only type in use that takes four bytes; all others take two."""


_LAYER_KERNELS = 12
"""Dependent kernels of a layer's dense part, of which the gate is one: two norms, four
projections, rotary, attention, softmax, two residuals, gate.
"""


Counts = Any
"""A number of tokens or sequences, or an array of one for each forward pass."""


class DenseWork(NamedTuple):
    """Bytes and operations of a dense part; arrays where it was asked for arrays."""

    weight_bytes: Any
    flops: Any
    kept_bytes: Any = 0.0
    """Keys and values that attention reads."""


class KeptEntries(NamedTuple):
    """Keys and values, or what stands for them, of the mean layer."""

    full_bytes: float
    """Of one token in a layer that keeps all of them."""
    windowed_bytes: float
    windowed_share: float
    """Layers that keep no more than a window, as a share of all."""
    window_tokens: int

    @classmethod
    def of(
        cls, shape: ModelShape, element_bytes: int, *, unknown: int = 0
    ) -> KeptEntries:
        """Those of a model; `unknown` values where it states neither heads nor
        `kv_values`.
        """
        windowed = 2 * shape.kv_heads * shape.head_dim or unknown
        return cls(
            full_bytes=float(element_bytes * (shape.kv_values or windowed)),
            windowed_bytes=float(element_bytes * windowed),
            windowed_share=shape.windowed_layers / shape.all_layers,
            window_tokens=shape.window_tokens,
        )

    def bytes(self, context_tokens: Counts) -> Any:
        """Bytes of one sequence in the mean layer."""
        full = (1.0 - self.windowed_share) * self.full_bytes * context_tokens
        in_window = np.minimum(context_tokens, self.window_tokens)
        return full + self.windowed_share * self.windowed_bytes * in_window

    def tokens(self, context_tokens: Counts) -> Any:
        """Tokens that the mean layer looks back at."""
        in_window = np.minimum(context_tokens, self.window_tokens)
        full = (1.0 - self.windowed_share) * context_tokens
        return full + self.windowed_share * in_window


class DenseSizes(NamedTuple):
    """Parameters outside the routed experts, by when they are read."""

    layer_params: float
    """One MoE layer: attention, gate, shared experts."""
    dense_layer_params: float
    """All layers without routed experts together."""
    head_params: float
    """Output head; of the embedding only the tokens' own rows are read."""
    all_params: int
    """Of the whole model, the embedding too."""
    param_bytes: float
    kept: KeptEntries
    attention_flops: float
    """Per query and key: scores and weighted values."""
    element_bytes: int

    @classmethod
    def of(cls, shape: ModelShape) -> DenseSizes:
        """Count parameters; their bytes are `shape.other_bytes` shared out evenly, so
        bytes are conserved.

        Where the shape does not know its attention (0 heads), four H x H matrices and
        full-width keys are assumed.
        """
        heads, kv_heads, head_dim = shape.attention
        query_width = heads * head_dim
        kv_width = kv_heads * head_dim

        # Query and output projections are query_width wide, keys and values kv_width.
        attention = 2 * shape.hidden * (query_width + kv_width)
        gate = shape.hidden * shape.experts
        shared_experts = 3 * shape.hidden * shape.shared_intermediate
        layer = attention + gate + shared_experts

        feed_forward = 3 * shape.hidden * shape.dense_intermediate
        dense_layers = len(shape.dense_layers) * (attention + feed_forward)

        # The embedding has as many parameters as the head, and takes bytes as well.
        head = shape.vocab * shape.hidden
        params = shape.layers * layer + dense_layers + 2 * head

        element_bytes = 4 if shape.dtype in _WIDE_DTYPES else 2
        return cls(
            layer_params=layer,
            dense_layer_params=dense_layers,
            head_params=head,
            all_params=params,
            param_bytes=shape.other_bytes / params,
            kept=KeptEntries.of(shape, element_bytes, unknown=2 * kv_width),
            attention_flops=4.0 * query_width,
            element_bytes=element_bytes,
        )

    def layer_work(
        self, tokens: Counts, context_tokens: Counts, sequences: Counts
    ) -> DenseWork:
        """Return bytes and FLOPs of one layer's dense part."""
        # q queries at the end of a context of c see c - (q - 1) / 2 keys on average
        # (causal attention).
        keys_seen = context_tokens - (tokens / sequences - 1) / 2
        projections = 2.0 * self.layer_params * tokens
        attention = self.attention_flops * tokens * self.kept.tokens(keys_seen)
        weights = self.layer_params * self.param_bytes
        keys_and_values = self.kept.bytes(context_tokens) * sequences
        return DenseWork(weights, projections + attention, keys_and_values)

    def head_work(self, tokens: Counts, outputs: Counts) -> DenseWork:
        """Return bytes and FLOPs of what happens once per step."""
        # Dense layers see every token; the head only positions whose output is wanted.
        used = self.dense_layer_params * tokens + self.head_params * outputs
        weight_bytes = self.params(head=True) * self.param_bytes
        return DenseWork(weight_bytes, flops=2.0 * used)

    def params(self, *, head: bool) -> float:
        """Parameters of one layer's dense part, or of what happens once per step."""
        return self.dense_layer_params + self.head_params if head else self.layer_params


class DenseCosts:
    """Seconds of dense parts of one model on one machine's GPU; counts are numbers, or
    arrays with one for each forward pass.

    Args:
        profile: the machine.
        shape: the model.
    """

    def __init__(self, profile: HardwareProfile, shape: ModelShape) -> None:
        self._profile = profile
        self._shape = shape
        self.sizes = DenseSizes.of(shape)

    @cached_property
    def _roof(self) -> RooflineModel:
        """Looked up at the first use: a profile may lack costs that no run needs."""
        return RooflineModel.of(self._profile, DENSE)

    def layer_s(
        self, tokens: Counts, context_tokens: Counts, sequences: Counts
    ) -> np.ndarray:
        """Return the seconds of one layer's dense part; see `Costs.dense_s`."""
        work = self.sizes.layer_work(tokens, context_tokens, sequences)
        read_bytes = work.weight_bytes
        attention_s = 0.0
        # Libraries read keys and values at a rate of their own, a third of the weights'
        # on a host. Where it was not told apart, they are read as weights are.
        rate = self._profile.numbers.get(ATTENTION_BYTES_PER_S)
        if rate is None:
            read_bytes = read_bytes + work.kept_bytes
        else:
            attention_s = work.kept_bytes / rate.value
        in_place = self._in_place(tokens)
        return self._roof.seconds(read_bytes, work.flops) * in_place + attention_s

    def gate_s(self, tokens: Counts) -> np.ndarray:
        """Return the seconds of one gate by itself; see `Costs.gate_s`."""
        params = self._shape.hidden * self._shape.experts
        read_bytes = params * self.sizes.param_bytes
        # The roofline charges the launches of a whole layer.
        launches_s = self._roof.seconds(0.0, 0.0)
        work_s = self._roof.seconds(read_bytes, 2.0 * params * tokens) - launches_s
        return (launches_s / _LAYER_KERNELS + work_s) * self._in_place(tokens)

    def head_s(self, tokens: Counts, outputs: Counts) -> np.ndarray:
        """Return the seconds of what happens once per step; see `Costs.head_s`."""
        work = self.sizes.head_work(tokens, outputs)
        in_place = self._in_place(outputs, head=True)
        return self._roof.seconds(work.weight_bytes, work.flops) * in_place

    def _in_place(self, tokens: Counts, *, head: bool = False) -> np.ndarray | float:
        """Return by what factor a dense part of so many tokens differs from the
        roofline, at the most similar size calibrated; 1 where none was.

        One token is a matrix times a vector, several a product of matrices: libraries
        are not equally good at both, and less good where rows are short. So the most
        similar size is that of the nearest width, then bytes.
        """
        part = HEAD if head else DENSE
        sizes = (
            MeasuredPart.of(self._profile, part, small=small) for small in (False, True)
        )
        calibrated = [measured for measured in sizes if measured is not None]
        if not calibrated:
            return 1.0

        params = self.sizes.params(head=head)
        part_bytes = max(1.0, params * self.sizes.param_bytes)

        def distance(measured: MeasuredPart) -> tuple[float, float]:
            # Logarithms: twice as wide is as far away as half as wide.
            reference = measured.reference
            width_ratio = reference.hidden / self._shape.hidden
            size_ratio = reference.bytes / part_bytes
            return abs(np.log(width_ratio)), abs(np.log(size_ratio))

        curve, reference = min(calibrated, key=distance)
        flops = np.asarray(curve.at) * flops_per_token(reference)
        factors = np.asarray(curve.seconds) / self._roof.seconds(reference.bytes, flops)
        return np.interp(tokens, curve.at, factors)


def dense_reference(shape: ModelShape, *, head: bool = False) -> ReferenceExpert:
    """Describe the dense part of one layer, or the head, as an expert of as many
    weights: ``6 H F = 2 x weights`` FLOPs per token.
    """
    sizes = DenseSizes.of(shape)
    params = sizes.params(head=head)
    return ReferenceExpert(
        hidden=shape.hidden,
        intermediate=max(1, round(params / (3 * shape.hidden))),
        bytes=max(1, round(params * sizes.param_bytes)),
        dtype=shape.dtype,
    )


def dense_work(
    shape: ModelShape, tokens: int, context_tokens: int, sequences: int, *, head: bool
) -> DenseWork:
    """Return what `Costs.dense_s`, or with `head` `Costs.head_s`, turns into seconds;
    the head's outputs are one per sequence.
    """
    sizes = DenseSizes.of(shape)
    if head:
        return sizes.head_work(tokens, sequences)
    return sizes.layer_work(tokens, context_tokens, sequences)

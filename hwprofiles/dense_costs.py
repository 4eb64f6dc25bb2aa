"""Seconds of what is not a routed expert: a layer's dense part, and the head of a step.

The dense part of a layer is attention, norms, gate and shared experts. The head is what
happens once per step: embedding, feed-forward of dense layers, output projection.
"""

from __future__ import annotations

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
        params = self.dense_layer_params + self.head_params
        return DenseWork(
            weight_bytes=params * self.param_bytes,
            flops=2.0 * used,
        )


class DenseCosts:
    """Seconds of dense parts of one model on one machine's GPU.

    Args:
        profile: the machine.
        shape: the model.
    """

    def __init__(self, profile: HardwareProfile, shape: ModelShape) -> None:
        self._profile = profile
        self._shape = shape
        self._factors: dict[tuple[str, int], float] = {}
        self._roof: RooflineModel | None = None
        self.sizes = DenseSizes.of(shape)

    def layer_s(self, tokens: int, context_tokens: int, sequences: int) -> float:
        """Return the seconds of one layer's dense part; see `Costs.dense_s`."""
        work = self.sizes.layer_work(tokens, context_tokens, sequences)
        in_place = self._in_place(DENSE, self.sizes.layer_params, tokens)
        read_bytes, attention_s = self._reads(work)
        return self._roofline_s(read_bytes, work.flops) * in_place + attention_s

    def gate_s(self, tokens: int) -> float:
        """Return the seconds of one gate by itself; see `Costs.gate_s`."""
        params = self._shape.hidden * self._shape.experts
        read_bytes = params * self.sizes.param_bytes
        # The roofline charges the launches of a whole layer.
        launches_s = self._roofline_s(0.0, 0.0)
        work_s = self._roofline_s(read_bytes, 2.0 * params * tokens) - launches_s
        in_place = self._in_place(DENSE, self.sizes.layer_params, tokens)
        return (launches_s / _LAYER_KERNELS + work_s) * in_place

    def head_s(self, tokens: int, outputs: int) -> float:
        """Return the seconds of what happens once per step; see `Costs.head_s`."""
        work = self.sizes.head_work(tokens, outputs)
        params = self.sizes.dense_layer_params + self.sizes.head_params
        in_place = self._in_place(HEAD, params, outputs)
        return self._roofline_s(work.weight_bytes, work.flops) * in_place

    def of_passes(
        self, tokens: np.ndarray, context_tokens: np.ndarray, sequences: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `layer_s`, and `head_s` of one output per sequence, of many passes."""
        layer = self.sizes.layer_work(tokens, context_tokens, sequences)
        head = self.sizes.head_work(tokens, sequences)
        head_params = self.sizes.dense_layer_params + self.sizes.head_params
        layer_factors = self._in_place_of(DENSE, self.sizes.layer_params, tokens)
        head_factors = self._in_place_of(HEAD, head_params, sequences)
        read_bytes, attention_s = self._reads(layer)
        roof = self._machine_roof()
        return (
            roof.seconds(read_bytes, layer.flops) * layer_factors + attention_s,
            roof.seconds(head.weight_bytes, head.flops) * head_factors,
        )

    def _reads(self, work: DenseWork) -> tuple[Any, Any]:
        """Bytes that the roofline prices, and seconds of attention beside it.

        Libraries read keys and values at a rate of their own, a third of the weights'
        on a host. Where it was not told apart, they are read as weights are.
        """
        rate = self._profile.numbers.get(ATTENTION_BYTES_PER_S)
        if rate is None:
            return work.weight_bytes + work.kept_bytes, 0.0
        return work.weight_bytes, work.kept_bytes / rate.value

    def _in_place_of(self, part: str, params: float, counts: np.ndarray) -> np.ndarray:
        """`_in_place` of arrays: mostly of few different numbers."""
        distinct, places = np.unique(counts, return_inverse=True)
        factors = [self._in_place(part, params, count) for count in distinct.tolist()]
        return np.array(factors)[places]

    def reference_s(self, tokens: float, *, head: bool) -> float:
        """Return the seconds of this model's reference dense part, or head, as a curve
        over tokens states them: attention to earlier tokens is left out.
        """
        reference = dense_reference(self._shape, head=head)
        params = self.sizes.layer_params
        if head:
            params = self.sizes.dense_layer_params + self.sizes.head_params
        in_place = self._measured_factor(HEAD if head else DENSE, params, tokens)
        flops = tokens * flops_per_token(reference)
        return self._roofline_s(reference.bytes, flops) * in_place

    def _roofline_s(self, read_bytes: float, flops: float) -> float:
        roof = self._machine_roof()
        reading_s = read_bytes / roof.bytes_per_s
        computing_s = flops / roof.flops_per_s
        return roof.overhead_s + max(reading_s, computing_s)

    def _machine_roof(self) -> RooflineModel:
        # Looked up at the first use: a profile may lack costs that no run needs.
        if self._roof is None:
            self._roof = RooflineModel.of(self._profile, DENSE)
        return self._roof

    def _in_place(self, part: str, params: float, tokens: int) -> float:
        """Return by what factor a dense part of so many tokens differs from the
        roofline, at the most similar size calibrated; 1 where none was.

        One token is a matrix times a vector, several a product of matrices: libraries
        are not equally good at both, and less good where rows are short. So the most
        similar size is that of the nearest width, then bytes.
        """
        factor = self._factors.get((part, tokens))
        if factor is None:
            factor = self._factors[part, tokens] = self._measured_factor(
                part, params, tokens
            )
        return factor

    def _measured_factor(self, part: str, params: float, tokens: float) -> float:
        sizes = (
            MeasuredPart.of(self._profile, part, small=small) for small in (False, True)
        )
        calibrated = [measured for measured in sizes if measured is not None]
        if not calibrated:
            return 1.0

        part_bytes = max(1.0, params * self.sizes.param_bytes)

        def distance(measured: MeasuredPart) -> tuple[float, float]:
            # Logarithms: twice as wide is as far away as half as wide.
            reference = measured.reference
            width_ratio = reference.hidden / self._shape.hidden
            size_ratio = reference.bytes / part_bytes
            return abs(np.log(width_ratio)), abs(np.log(size_ratio))

        nearest = min(calibrated, key=distance)
        curve = nearest.curve
        reference = nearest.reference
        factors = []
        for at, seconds in zip(curve.at, curve.seconds, strict=True):
            flops = at * flops_per_token(reference)
            factors.append(seconds / self._roofline_s(reference.bytes, flops))
        return float(np.interp(tokens, curve.at, factors))


def dense_reference(shape: ModelShape, *, head: bool = False) -> ReferenceExpert:
    """Describe the dense part of one layer, or the head, as an expert of as many
    weights: ``6 H F = 2 x weights`` FLOPs per token.
    """
    sizes = DenseSizes.of(shape)
    params = sizes.layer_params
    if head:
        params = sizes.dense_layer_params + sizes.head_params
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

"""What a step has to move and compute, before any rate is known.

`DecodeWork` and `PrefillWork` hold bytes, layers and FLOPs by the resource that serves
them. They depend on the model and the setting only, never on the machine.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from moesim.advice.times.setting import KV_SHARES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.advice.model.contents import LayerContents, ModelContents
    from moesim.advice.times.setting import Setting


# Spread of experts' popularity (see `used_share`) in text, where gates balance better
# than on the random tokens of benchmarks.
TEXT_SKEW = 1.0


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """One decode step of one sequence.

    Attributes:
        host_experts: weight format -> bytes of experts that the CPU reads.
        host_expert_layers: layers with such experts.
        host_dense: weight format -> bytes of everything else on the CPU.
        host_dense_layers: layers that run on the CPU as a whole.
        device: weight format -> bytes that the GPUs read.
        device_layers: layers with attention on the GPUs.
        device_recurrent: layers with a recurrence on the GPUs.
        device_kv: query heads per key head -> keys and values that the GPUs read.
        host_kv_bytes: the same on the CPU.
    """

    host_experts: Mapping[str, float] = field(default_factory=dict)
    host_expert_layers: int = 0
    host_dense: Mapping[str, float] = field(default_factory=dict)
    host_dense_layers: int = 0
    device: Mapping[str, float] = field(default_factory=dict)
    device_layers: int = 0
    device_recurrent: int = 0
    device_kv: Mapping[int, float] = field(default_factory=dict)
    host_kv_bytes: float = 0.0

    @property
    def device_kv_bytes(self) -> float:
        """Keys and values on the GPUs, each counted once."""
        return sum(self.device_kv.values())

    @property
    def host_bytes(self) -> float:
        """All bytes that the CPU reads."""
        experts = sum(self.host_experts.values())
        return experts + sum(self.host_dense.values()) + self.host_kv_bytes

    @property
    def device_bytes(self) -> float:
        """All bytes that the GPUs read."""
        return sum(self.device.values()) + self.device_kv_bytes


def decode_work(
    model: ModelContents, setting: Setting, context_tokens: float = 0.0
) -> DecodeWork:
    """Sort one decode step's bytes by who reads them.

    Args:
        model: its contents.
        setting: where layers and experts lie.
        context_tokens: mean depth of the context while tokens are made.
    """
    host_experts: Counter[str] = Counter()
    host_dense: Counter[str] = Counter()
    device: Counter[str] = Counter()
    kv_share = KV_SHARES.get(setting.kv_format, 1.0)
    device_kv: Counter[int] = Counter()
    host_kv = 0.0
    counts: Counter[str] = Counter()

    first_gpu = setting.first_gpu_layer(model)
    on_host = set(setting.on_host(model))
    sequences = setting.sequences
    for at, layer in enumerate(model.layers):
        share = layer.active_share
        if sequences > 1 and layer.experts:
            # Requests share experts: each one that any of them uses is read once.
            share = used_share(layer.experts, layer.top_k, sequences, TEXT_SKEW)
        active = {name: stored * share for name, stored in layer.expert_formats.items()}
        kv_bytes = layer.kv_bytes(context_tokens) * kv_share
        # Recurrent state is read and written once per token.
        kv_bytes = sequences * (kv_bytes + 2 * layer.state_bytes)

        if at < first_gpu:
            counts["host dense"] += 1
            _add(host_dense, layer.dense_formats)
            host_kv += kv_bytes
        else:
            recurrent = not layer.kv_bytes_per_token
            counts["recurrent" if recurrent else "attention"] += 1
            _add(device, layer.dense_formats)
            _add(device_kv, {layer.query_group: kv_bytes})

        if at in on_host:
            counts["host experts"] += 1
            _add(host_experts, active)
        else:
            _add(device, active)

    head = {model.head_format: float(model.head_bytes)}
    _add(device if setting.head_on_gpu(model) else host_dense, head)
    return DecodeWork(
        host_experts=dict(host_experts),
        host_expert_layers=counts["host experts"],
        host_dense=dict(host_dense),
        host_dense_layers=counts["host dense"],
        device=dict(device),
        device_layers=counts["attention"],
        device_recurrent=counts["recurrent"],
        device_kv=dict(device_kv),
        host_kv_bytes=host_kv,
    )


def _add(total: Counter[Any], more: Mapping[Any, float]) -> None:
    for name, stored in more.items():
        total[name] += stored  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Layers whose experts are equal in number, size and place.

    Attributes:
        layers: how many.
        experts: E.
        top_k: K.
        stored_bytes: of all experts of one layer.
        weights: of one expert.
        host_format: weight format if they lie in host memory, else empty.
    """

    layers: int
    experts: int
    top_k: int
    stored_bytes: float
    weights: float
    host_format: str


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """A prompt, cut into micro-batches.

    Attributes:
        chunks: (tokens, tokens before it) -> how many such micro-batches.
        groups: routed experts by place.
        device_dense_weights: multiplied with every token on the GPUs.
        host_dense_weights: multiplied with every token on the CPU.
        device_bytes: read once per micro-batch on the GPUs, without host experts.
        layers: all layers.
        attention_widths: (width, window) -> layers.
        attention_on_gpu: share of layers whose attention runs on the GPUs.
    """

    chunks: Mapping[tuple[int, int], int]
    groups: tuple[ExpertGroup, ...]
    device_dense_weights: float
    host_dense_weights: float
    device_bytes: float
    layers: int
    attention_widths: Mapping[tuple[int, int], int]
    attention_on_gpu: float

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(tokens * count for (tokens, _), count in self.chunks.items())


def prefill_work(
    model: ModelContents, setting: Setting, prompt_tokens: int, depth_tokens: int = 0
) -> PrefillWork:
    """Sort the work of reading a prompt.

    Args:
        model: its contents.
        setting: where layers and experts lie, and the size of micro-batches.
        prompt_tokens: length of the prompt, >= 1.
        depth_tokens: context in front of it.
    """
    first_gpu = setting.first_gpu_layer(model)
    on_host = set(setting.on_host(model))
    groups: Counter[tuple[int, int, int, int, str]] = Counter()
    widths: Counter[tuple[int, int]] = Counter()
    dense = {True: 0.0, False: 0.0}
    device_bytes = 0.0

    for at, layer in enumerate(model.layers):
        on_gpu = at >= first_gpu
        dense[on_gpu] += layer.dense_weights
        widths[layer.attention_width, layer.window_tokens] += 1
        if on_gpu:
            device_bytes += layer.dense_bytes
        if layer.experts:
            groups[_group_key(layer, host=at in on_host)] += 1
            if at not in on_host:
                device_bytes += layer.expert_bytes

    return PrefillWork(
        chunks=micro_batches(prompt_tokens, setting, depth_tokens),
        groups=tuple(
            ExpertGroup(
                layers=count,
                experts=experts,
                top_k=top_k,
                stored_bytes=stored,
                weights=weights / experts,
                host_format=host_format,
            )
            for (experts, top_k, stored, weights, host_format), count in groups.items()
        ),
        device_dense_weights=dense[True],
        host_dense_weights=dense[False],
        device_bytes=device_bytes,
        layers=len(model.layers),
        attention_widths=dict(widths),
        attention_on_gpu=1 - first_gpu / len(model.layers),
    )


def micro_batches(
    prompt_tokens: int, setting: Setting, depth_tokens: int = 0
) -> dict[tuple[int, int], int]:
    """Cut a prompt into batches and those into micro-batches.

    Returns:
        (tokens, tokens in front) -> count. A micro-batch never crosses a batch.
    """
    chunks: Counter[tuple[int, int]] = Counter()
    batch = max(1, setting.batch)
    micro = max(1, min(setting.micro_batch, batch))

    for batch_start in range(0, prompt_tokens, batch):
        batch_end = min(prompt_tokens, batch_start + batch)
        for start in range(batch_start, batch_end, micro):
            tokens = min(micro, batch_end - start)
            chunks[tokens, depth_tokens + start] += 1
    return dict(chunks)


def _group_key(layer: LayerContents, *, host: bool) -> tuple[int, int, int, int, str]:
    main = max(layer.expert_formats, key=lambda name: layer.expert_formats[name])
    return (
        layer.experts,
        layer.top_k,
        layer.expert_bytes,
        layer.expert_weights,
        main if host else "",
    )


def _normal_quantile(share: float) -> float:
    """Quantile of the normal distribution.

    Source: Abramowitz and Stegun 26.2.23, error below 4.5e-4.
    """
    tail = min(share, 1 - share)
    root = math.sqrt(-2 * math.log(tail))
    top = 2.515517 + root * (0.802853 + root * 0.010328)
    bottom = 1 + root * (1.432788 + root * (0.189269 + root * 0.001308))
    value = root - top / bottom
    return value if share > 0.5 else -value


# Midpoints of equally likely slices of the normal distribution.
SLICES = 32
QUANTILES = tuple(_normal_quantile((index + 0.5) / SLICES) for index in range(SLICES))


# Every candidate asks for the same few batches, with rates that differ a little.
@lru_cache(maxsize=100_000)
def used_share(experts: int, top_k: int, tokens: int, skew: float) -> float:
    """Return the expected share of experts that at least one token of a batch chooses.

    Experts differ in popularity: their chances are log-normal with spread `skew`, as
    real gates show; with equal chances nearly all would be used from a few dozen tokens
    on, and uploads measured at small micro-batches would be larger than they are.

    Args:
        experts: E.
        top_k: K.
        tokens: of the batch.
        skew: standard deviation of the logarithm of an expert's chance.
    """
    # An empty batch uses nothing.
    if tokens <= 0:
        return 0.0

    mean = top_k / experts
    used = 0.0
    # The scale keeps the mean chance K / E.
    raw = [math.exp(skew * quantile) for quantile in QUANTILES]
    scale = mean * len(raw) / sum(raw)
    for value in raw:
        # Scaling may push the most popular experts beyond certainty.
        chance = min(1.0, value * scale)
        used += 1.0 - (1.0 - chance) ** tokens
    return used / len(raw)

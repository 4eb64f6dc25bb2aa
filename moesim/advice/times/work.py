"""What a step has to move and compute, before any rate is known.

`DecodeWork` and `PrefillWork` hold bytes, layers and FLOPs by the resource that serves
them. They depend on the model and the setting only, never on the machine.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.advice.model.contents import ModelContents


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
        device_latent: layers with latent attention among `device_layers`.
        device_kv: query heads per key head -> keys and values that the GPUs read.
        host_kv_bytes: the same on the CPU.
        ssd_bytes: of host experts that the page cache lacks.
        sampled: vocabulary entries of all requests but the first, among which the
            server samples one request after the other.
        table_rows: rows of look-up tables that are read as they are asked for.
        cold_rows: of these, those that the page cache lacks.
    """

    host_experts: Mapping[str, float] = field(default_factory=dict)
    host_expert_layers: int = 0
    host_dense: Mapping[str, float] = field(default_factory=dict)
    host_dense_layers: int = 0
    device: Mapping[str, float] = field(default_factory=dict)
    device_layers: int = 0
    device_recurrent: int = 0
    device_latent: int = 0
    device_kv: Mapping[int, float] = field(default_factory=dict)
    host_kv_bytes: float = 0.0
    ssd_bytes: float = 0.0
    sampled: float = 0.0
    table_rows: float = 0.0
    cold_rows: float = 0.0

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
            counts["latent"] += layer.latent_values > 0
            _add(device, layer.dense_formats)
            if setting.kv_on_host:
                host_kv += kv_bytes
            else:
                _add(device_kv, {layer.query_group: kv_bytes})

        if at in on_host:
            counts["host experts"] += 1
            _add(host_experts, active)
        else:
            _add(device, active)

    vocabulary = model.head_weights / model.hidden if model.hidden else 0.0
    lazy = setting.tables != HELD and model.table_bytes
    head = {model.head_format: float(model.head_bytes)}
    _add(device if setting.head_on_gpu else host_dense, head)
    return DecodeWork(
        host_experts=dict(host_experts),
        host_expert_layers=counts["host experts"],
        host_dense=dict(host_dense),
        host_dense_layers=counts["host dense"],
        device=dict(device),
        device_layers=counts["attention"],
        device_recurrent=counts["recurrent"],
        device_latent=counts["latent"],
        device_kv=dict(device_kv),
        host_kv_bytes=host_kv,
        sampled=(sequences - 1) * vocabulary,
        table_rows=sequences * model.table_rows if lazy else 0.0,
    )


def _add(total: Counter[Any], more: Mapping[Any, float]) -> None:
    for name, stored in more.items():
        total[name] += stored  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Experts of a layer, by number, size and place.

    Attributes:
        experts: E.
        top_k: K.
        stored_bytes: of all experts of one layer.
        weights: of one expert.
        host_format: weight format if they lie in host memory, else empty.
    """

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
        groups: routed experts -> layers that have such.
        device_dense_weights: multiplied with every token on the GPUs.
        host_dense_weights: multiplied with every token on the CPU.
        device_bytes: read once per micro-batch on the GPUs, without host experts.
        layers: all layers.
        attention_widths: (width, window) -> layers.
        ssd_share: of host experts that the page cache lacks.
        cold_rows: rows of look-up tables that a token reads from the drive.
    """

    chunks: Mapping[tuple[int, int], int]
    groups: Mapping[ExpertGroup, int]
    device_dense_weights: float
    host_dense_weights: float
    device_bytes: float
    layers: int
    attention_widths: Mapping[tuple[int, int], int]
    ssd_share: float = 0.0
    cold_rows: float = 0.0

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
    groups: Counter[tuple[int, int, float, float, str]] = Counter()
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
            formats = layer.expert_formats
            main = max(formats, key=formats.__getitem__) if at in on_host else ""
            weights = layer.expert_weights / layer.experts
            counts = (layer.experts, layer.top_k)
            groups[(*counts, layer.expert_bytes, weights, main)] += 1
            if at not in on_host:
                device_bytes += layer.expert_bytes

    return PrefillWork(
        chunks=micro_batches(prompt_tokens, setting, depth_tokens),
        groups={ExpertGroup(*sizes): layers for sizes, layers in groups.items()},
        device_dense_weights=dense[True],
        host_dense_weights=dense[False],
        device_bytes=device_bytes,
        layers=len(model.layers),
        attention_widths=dict(widths),
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


RESCALINGS = 50
CERTAIN = 1e-9
# Midpoints of equally likely slices of the normal distribution.
SLICES = 32
QUANTILES = tuple(NormalDist().inv_cdf((at + 0.5) / SLICES) for at in range(SLICES))


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

    chances = _chances(top_k / experts, skew)
    unused = sum((1.0 - chance) ** tokens for chance in chances)
    return 1.0 - unused / len(chances)


@lru_cache(maxsize=1000)
def _chances(mean: float, skew: float) -> tuple[float, ...]:
    """Chances of equally many experts each, with the mean K / E.

    What the most popular ones have beyond certainty goes to the others.
    """
    raw = [math.exp(skew * quantile) for quantile in QUANTILES]
    scale = mean * len(raw) / sum(raw)
    for _ in range(RESCALINGS):
        chances = tuple(min(1.0, value * scale) for value in raw)
        missing = mean * len(raw) - sum(chances)
        free = sum(value for value in raw if value * scale < 1.0)
        if missing <= CERTAIN or not free:
            break
        scale += missing / free
    return chances


HELD = "held"
LAZY = "lazy"

DEFAULT_MICRO_BATCH = 512
DEFAULT_BATCH = 2048
ALL_LAYERS = 999
# No micro-batch is so large.
NEVER = 1 << 30

# Key-value formats: stored bytes relative to half precision.
KV_SHARES = {
    "f32": 2.0,
    "f16": 1.0,
    "bf16": 1.0,
    "q8_0": 34 / 64,
    "q8_kv": 33 / 64,
    "q6_0": 26 / 64,
    "q5_1": 24 / 64,
    "q5_0": 22 / 64,
    "q4_1": 20 / 64,
    "q4_0": 18 / 64,
    "iq4_nl": 18 / 64,
}


def has_iqk_products(model: ModelContents) -> bool:
    """Tell whether ik_llama.cpp's fast products know the format of a model's experts.

    Source: ik_llama.cpp#2155, where MXFP4 on the CPU is slower than in llama.cpp.
    """
    return model.main_format != "mxfp4"


@dataclass(frozen=True, slots=True)
class Setting:
    """Flags of llama.cpp that times depend on.

    Attributes:
        cpu_layers: layers, counted from the first and with dense ones, whose experts
            stay in host memory (``--n-cpu-moe``).
        gpu_layers: layers kept on the GPUs at all (``-ngl``); the others run on the
            CPU as a whole. 0 is a machine without a GPU.
        threads: of the CPU; None takes the engine's default, one per fast core.
        micro_batch: ``-ub``.
        batch: ``-b``.
        flash: ``-fa``.
        kv_format: of keys and values (``-ctk``, ``-ctv``).
        page_locked: host weights lie in page-locked memory.
        used_only: a micro-batch uploads the experts that it uses, not all.
        gpu_from_tokens: a micro-batch of at least so many tokens computes host experts
            on the GPU; None asks the engine's rule.
        iqk: the CPU multiplies several tokens by ik_llama.cpp's kernels.
        chosen_layers: layers whose experts stay in host memory by name (``-ot``)
            instead of by number; None where `cpu_layers` counts.
        sequences: requests that are decoded together.
        split: layers of each card (``-ts``), the head as the last; empty leaves it to
            the engine.
        mapped: host weights stay in the file and are read through the page cache.
        kv_on_host: keys and values, and attention with them, stay on the CPU.
        tables: where look-up tables are: `HELD` in host memory, `LAZY` rows read from
            the file as they are asked for.
        random_tokens: prompts are drawn at random, as benchmarks do; such tokens
            choose fewer experts than text does.
    """

    cpu_layers: int = 0
    gpu_layers: int = ALL_LAYERS
    threads: int | None = None
    micro_batch: int = DEFAULT_MICRO_BATCH
    batch: int = DEFAULT_BATCH
    flash: bool = True
    kv_format: str = "f16"
    page_locked: bool = True
    used_only: bool = True
    gpu_from_tokens: int | None = None
    iqk: bool = False
    chosen_layers: frozenset[int] | None = None
    sequences: int = 1
    split: tuple[int, ...] = ()
    mapped: bool = False
    kv_on_host: bool = False
    tables: str = HELD
    random_tokens: bool = True

    def on_host(self, model: ModelContents) -> tuple[int, ...]:
        """Indices of MoE layers whose experts the CPU computes in decode."""
        first_gpu = self.first_gpu_layer(model)
        chosen = self.chosen_layers
        if chosen is None:
            chosen = frozenset(range(min(self.cpu_layers, len(model.layers))))
        return tuple(at for at in model.moe_layers if at in chosen or at < first_gpu)

    def first_gpu_layer(self, model: ModelContents) -> int:
        """Return the first layer that the GPUs hold; layers are taken from the end.

        The output head counts as the last of them.
        Source: `i_gpu_start = max(n_layer + 1 - n_gpu_layers, 0)` in llama.cpp; older
        forks took the head as the one layer more.
        """
        layers = len(model.layers)
        return min(layers, max(0, layers + 1 - self.gpu_layers))

    @property
    def head_on_gpu(self) -> bool:
        """Tell whether the output head is on a GPU; it is the first to go there."""
        return self.gpu_layers > 0

"""Kinds of layers, written once: what each holds, keeps of a token, and computes.

Catalogue, GGUF headers and ``config.json`` say of each layer which kind it is and how
large; everything that follows from it stands here.

Source of weights: the modules that transformers 5.23.0 builds, which the tests build,
too; of what is kept: llama.cpp's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

Sizes = Mapping[str, int]

STATE_BYTES_PER_VALUE = 4
"""Recurrent states stay in single precision."""

# Compressors that overlap, as those of few tokens do, see twice their window.
_OVERLAPPING = 4


@dataclass(frozen=True, slots=True)
class Mixer:
    """What mixes tokens in one layer: attention, a recurrence, or nothing.

    Attributes:
        weights: of its matrices.
        kv_values: kept of each token in reach: its keys and values, or one latent entry
            for all heads, and the key of an indexer.
        window_tokens: it looks back at most so far; 0 without a window.
        pooled_values: of the entry that several tokens of the whole context are
            compressed to, beside a window.
        pooled_tokens: so many tokens; 0 without such entries.
        waiting_bytes: of tokens that wait for the others of their entry.
        state_bytes: recurrent state of one sequence.
        attention_width: heads x (key + value size): multiply-adds per context token.
        query_group: query heads that share a key head.
        latent_values: where one entry serves all heads, values of one token that
            attention holds at once: of each head its query, as it was and with rotated
            part, absorbed, and both joined.
    """

    weights: int = 0
    kv_values: int = 0
    window_tokens: int = 0
    pooled_values: int = 0
    pooled_tokens: int = 0
    waiting_bytes: int = 0
    state_bytes: int = 0
    attention_width: int = 0
    query_group: int = 1
    latent_values: int = 0


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer: its mixer and its feed-forward.

    Attributes:
        mixer: attention or what stands in its place.
        feed_forward: weights that every token is multiplied with: a dense part, shared
            experts, projections into and out of latents, connections between layers.
        exact: weights that stay in single precision: gate and norms.
        experts: routed experts; 0 without.
        zero_experts: choices of the gate that read nothing, beside `experts`.
        top_k: choices per token.
        expert_hidden: values that a routed expert reads and writes.
        expert_intermediate: F.
        matrices: of an expert, 3 where it is gated.
    """

    mixer: Mixer
    feed_forward: int = 0
    exact: int = 0
    experts: int = 0
    zero_experts: int = 0
    top_k: int = 0
    expert_hidden: int = 0
    expert_intermediate: int = 0
    matrices: int = 3


def _attention(sizes: Sizes) -> Mixer:
    """Keys and values of some heads, within a window if there is one."""
    hidden = sizes["hidden"]
    heads = sizes["heads"]
    kv_heads = sizes["kv_heads"] or heads
    key = sizes["key"]
    value = sizes.get("value", key)

    queries = heads * key * (2 if sizes.get("gated") else 1)
    # Values that are the keys have no matrix, but are cached.
    keys_and_values = kv_heads * (key if sizes.get("same") else key + value)
    indexer = sizes.get("index_heads", 0) + sizes.get("index_kv_heads", 0)
    index = sizes.get("index", 0)
    return Mixer(
        weights=hidden * (queries + keys_and_values + heads * value + indexer * index),
        kv_values=kv_heads * (key + value) + index,
        window_tokens=sizes.get("window", 0),
        attention_width=heads * (key + value),
        query_group=max(1, heads // max(1, kv_heads)),
    )


def _latent(sizes: Sizes) -> Mixer:
    """One compressed entry for all heads (DeepSeek-V2's MLA), and an indexer's key."""
    hidden = sizes["hidden"]
    heads = sizes["heads"]
    entry = sizes["kv"] + sizes["rope"]
    query = sizes["nope"] + sizes["rope"]
    value = sizes["value"]

    rank = sizes.get("q", 0)
    weights = rank * (hidden + heads * query) if rank else hidden * heads * query
    weights += hidden * entry
    weights += sizes["kv"] * heads * (sizes["nope"] + value)
    weights += heads * value * hidden * (2 if sizes.get("gated") else 1)
    index = sizes.get("index", 0)
    index_heads = sizes.get("index_heads", 0)
    weights += index * index_heads * (rank or hidden) + hidden * (index + index_heads)
    return Mixer(
        weights=weights,
        kv_values=entry + index,
        # Prompts are read with full keys and values, not with the compressed ones.
        attention_width=heads * (query + value),
        latent_values=heads * (2 * entry + query),
    )


def _compressed(sizes: Sizes) -> Mixer:
    """One entry a token within a window, one for `ratio` tokens beyond it, and where
    that is few an indexer (DeepSeek-V4).

    Source of what is kept: `llama_kv_cache_dsv4` of llama.cpp, which holds values and
    scores of waiting tokens in single precision.
    """
    hidden = sizes["hidden"]
    heads = sizes["heads"]
    key = sizes["key"]
    ratio = sizes.get("ratio", 0)
    groups = sizes["o_groups"]

    weights = sizes["q"] * (hidden + heads * key) + hidden * key
    weights += sizes["o"] * (heads * key + groups * hidden)
    overlap = 2 if ratio == _OVERLAPPING else 1
    pooled = key if ratio else 0
    if overlap == 2:
        index = sizes["index"]
        pooled += index
        weights += sizes["index_heads"] * (sizes["q"] * index + hidden)
    weights += 2 * overlap * hidden * pooled
    return Mixer(
        weights=weights,
        kv_values=key,
        window_tokens=sizes["window"],
        pooled_values=pooled,
        pooled_tokens=ratio,
        waiting_bytes=2 * STATE_BYTES_PER_VALUE * overlap**2 * ratio * pooled,
        attention_width=2 * heads * key,
        query_group=heads,
    )


def _delta(sizes: Sizes) -> Mixer:
    """A gated delta rule (Qwen3-Next): a matrix of key x value size per value head."""
    keys = sizes["key_heads"] * sizes["key"]
    values = sizes["value_heads"] * sizes["value"]
    state = sizes["value_heads"] * sizes["key"] * sizes["value"]
    conv = (2 * keys + values) * sizes.get("conv", 4)
    inputs = 2 * keys + 2 * values + 2 * sizes["value_heads"]
    return Mixer(
        weights=sizes["hidden"] * (inputs + values) + conv,
        state_bytes=state * STATE_BYTES_PER_VALUE,
    )


def _kda(sizes: Sizes) -> Mixer:
    """Kimi's delta attention: gates of low rank beside queries, keys and values."""
    hidden = sizes["hidden"]
    width = sizes["heads"] * sizes["key"]
    low_rank = sizes["key"] * (hidden + width)
    gate = hidden * width if sizes.get("full_gate") else low_rank
    weights = 4 * hidden * width + low_rank + gate + hidden * sizes["heads"]
    return Mixer(
        weights=weights + 3 * width * sizes.get("conv", 4),
        state_bytes=width * sizes["key"] * STATE_BYTES_PER_VALUE,
    )


def _ssm(sizes: Sizes) -> Mixer:
    """Mamba 2: a state for each channel."""
    inner = sizes["heads"] * sizes["key"]
    grouped = 2 * sizes["groups"] * sizes["state"]
    inputs = 2 * inner + grouped + sizes["heads"]
    conv = (inner + grouped) * sizes.get("conv", 4)
    return Mixer(
        weights=sizes["hidden"] * (inputs + inner) + conv,
        state_bytes=inner * sizes["state"] * STATE_BYTES_PER_VALUE,
    )


def _mamba1(sizes: Sizes) -> Mixer:
    """Mamba: a state for each channel, its step of low rank."""
    inner = sizes["inner"]
    state = sizes["state"]
    inputs = 2 * inner + inner
    steps = 2 * sizes["rank"] + 2 * state + state + sizes.get("conv", 4)
    return Mixer(
        weights=sizes["hidden"] * inputs + inner * steps,
        state_bytes=inner * state * STATE_BYTES_PER_VALUE,
    )


def _lightning(sizes: Sizes) -> Mixer:
    """Linear attention with a gated output (MiniMax-01)."""
    width = sizes["heads"] * sizes["key"]
    return Mixer(
        weights=5 * sizes["hidden"] * width,
        state_bytes=width * sizes["key"] * STATE_BYTES_PER_VALUE,
    )


def _conv(sizes: Sizes) -> Mixer:
    """A short gated convolution (LFM2)."""
    hidden = sizes["hidden"]
    length = sizes.get("conv", 3)
    return Mixer(
        weights=hidden * (4 * hidden + length),
        state_bytes=hidden * (length - 1) * STATE_BYTES_PER_VALUE,
    )


KINDS: Mapping[str, Callable[[Sizes], Mixer]] = {
    "attention": _attention,
    "latent": _latent,
    "compressed": _compressed,
    "delta": _delta,
    "kda": _kda,
    "ssm": _ssm,
    "mamba1": _mamba1,
    "lightning": _lightning,
    "conv": _conv,
    "none": lambda _: Mixer(),
}
"""Kind -> what a layer of these sizes is."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A row of a model's table of kinds: which of `KINDS`, and how large."""

    kind: str
    sizes: Sizes = field(default_factory=dict)

    def mixer(self, **more: int) -> Mixer:
        """Return the layer's mixer; `more` sizes are those of one layer."""
        return KINDS[self.kind]({**self.sizes, **more})


def repeated(mixer: Mixer, times: int) -> Mixer:
    """Return a layer's mixer where it has `times` of them one after the other."""
    if times == 1:
        return mixer
    return replace(
        mixer,
        weights=times * mixer.weights,
        kv_values=times * mixer.kv_values,
        attention_width=times * mixer.attention_width,
        state_bytes=times * mixer.state_bytes,
    )

"""Turns a GGUF header into the contents of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesim.advice.errors import AdviceError
from moesim.advice.model.contents import F16_BYTES, LayerContents, ModelContents
from moesim.advice.model.gguf_header import file_type_label, read_gguf
from moesim.advice.model.tensors import LayerTensors, sort_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STATE_BYTES_PER_VALUE = 4


def gguf_contents(path: Path) -> ModelContents:
    """Read what a GGUF file holds.

    Raises:
        AdviceError: a broken header, missing metadata, or a model without experts.
    """
    header = read_gguf(path)
    keys = _Keys(path, header.metadata)

    stored_layers = keys.whole("block_count")
    run_layers = stored_layers - keys.whole("nextn_predict_layers", 0)
    parts = sort_tensors(header.tensors, run_layers)

    experts = keys.whole("expert_count", 0)
    routed_bytes = sum(layer.expert_bytes for layer in parts.layers.values())
    if not experts or not routed_bytes:
        raise AdviceError(
            f"{path}: {keys.architecture}: no routed experts in this file; moesim"
            " advises on Mixture-of-Experts models only"
        )
    # A part of a split file under another name looks like this.
    missing = [at for at in range(run_layers) if at not in parts.layers]
    if missing:
        raise AdviceError(
            f"{path}: its header says {run_layers} layers, found no tensor of layer"
            f" {missing[0]}; is this one part of a split file?"
        )

    layers = tuple(_layer(parts.layers[at], at, keys) for at in range(run_layers))
    # Tied models store no head of their own.
    head = parts.head if parts.head.dense_bytes else parts.embed
    head_format = next(iter(head.dense_formats), "f16")
    return ModelContents(
        name=path.name,
        architecture=keys.architecture,
        layers=layers,
        embed_bytes=parts.embed.dense_bytes,
        head_bytes=head.dense_bytes,
        head_weights=head.dense_weights,
        head_format=head_format,
        hidden=keys.whole("embedding_length"),
        source="gguf header",
        quant=file_type_label(header.metadata),
        tied=not parts.head.dense_bytes,
        # Tensors outside the layers (rope factors, the last norm) are small.
        unused_bytes=parts.unused_bytes + parts.rest_bytes,
        trained_tokens=keys.whole("context_length", 0),
    )


class _Keys:
    """Metadata of one architecture: ``block_count`` means ``qwen3moe.block_count``."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.architecture = str(metadata.get("general.architecture", "?"))

    def value(self, key: str) -> Any:
        """Return the value of one key, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None, layer: int = 0) -> int:
        """Return a whole number; arrays hold one per layer.

        Raises:
            AdviceError: the header lacks it and there is no default.
        """
        value = self.value(key)
        if isinstance(value, tuple):
            value = value[min(layer, len(value) - 1)] if value else None
        if value is None:
            if default is None:
                raise AdviceError(
                    f"{self.path}: the GGUF header lacks {self.architecture}.{key}; is"
                    " this a language model?"
                )
            return default
        return int(value)


def _layer(sums: LayerTensors, at: int, keys: _Keys) -> LayerContents:
    attention = _Attention(keys, at)
    experts = keys.whole("expert_count") if sums.expert_bytes else 0
    return LayerContents(
        dense_bytes=sums.dense_bytes,
        dense_weights=sums.dense_weights,
        dense_formats=dict(sums.dense_formats),
        experts=experts,
        top_k=keys.whole("expert_used_count", 1) if experts else 0,
        expert_bytes=sums.expert_bytes,
        expert_weights=sums.expert_weights,
        expert_formats=dict(sums.expert_formats),
        kv_bytes_per_token=attention.kv_bytes_per_token,
        window_tokens=attention.window_tokens,
        state_bytes=attention.state_bytes,
        attention_width=attention.width,
        query_group=attention.query_group,
    )


class _Attention:
    """Sizes of one layer's attention, or of the recurrence that stands in its place."""

    def __init__(self, keys: _Keys, at: int) -> None:
        self.kv_bytes_per_token = 0
        self.window_tokens = 0
        self.state_bytes = 0
        self.width = 0
        self.query_group = 1

        if self._recurrent(keys, at):
            inner = keys.whole("ssm.inner_size", 0)
            state = keys.whole("ssm.state_size", 0)
            self.state_bytes = inner * state * STATE_BYTES_PER_VALUE
            return

        heads = keys.whole("attention.head_count", 0, at)
        hidden = keys.whole("embedding_length")
        kv_heads = keys.whole("attention.head_count_kv", heads, at)
        size = hidden // heads if heads else 0
        key_size = keys.whole("attention.key_length", size, at)
        value_size = keys.whole("attention.value_length", size, at)
        rank = keys.whole("attention.kv_lora_rank", 0)

        if rank:
            # Multi-head latent attention keeps one compressed entry for all heads.
            rope = keys.whole("rope.dimension_count", 0)
            self.kv_bytes_per_token = (rank + rope) * F16_BYTES
            self.width = heads * (key_size + value_size)
        else:
            self.kv_bytes_per_token = kv_heads * (key_size + value_size) * F16_BYTES
            self.width = heads * (key_size + value_size)
            self.query_group = max(1, heads // max(1, kv_heads))
        self.window_tokens = self._window(keys, at)

    @staticmethod
    def _recurrent(keys: _Keys, at: int) -> bool:
        # Hybrids (Qwen3-Next and later): every n-th layer has full attention.
        interval = keys.whole("full_attention_interval", 0)
        if (
            not interval
            and keys.value("ssm.inner_size")
            and "qwen3" in keys.architecture
        ):
            interval = 4
        if interval:
            return (at + 1) % interval != 0

        # Others state key-value heads by layer; 0 marks a layer without attention.
        stated = keys.value("attention.head_count_kv")
        return (
            isinstance(stated, tuple)
            and keys.whole("attention.head_count_kv", 0, at) == 0
        )

    @staticmethod
    def _window(keys: _Keys, at: int) -> int:
        window = keys.whole("attention.sliding_window", 0)
        pattern = keys.value("attention.sliding_window_pattern")
        if isinstance(pattern, tuple):
            return window if pattern[min(at, len(pattern) - 1)] else 0
        if keys.architecture == "gpt-oss":
            # Alternates, beginning with a window.
            return window if at % 2 == 0 else 0
        return 0

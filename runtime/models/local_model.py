"""A model on this machine, with its tokenizer; nothing is ever downloaded. One ships
with the project.

Recording and running need a model whose gates were *learned*: random gates spread
tokens like dice, and every cache looks equally bad. The shipped one has a large model's
anatomy at a thousandth of its size: a Hugging Face `Qwen3MoeForCausalLM` reading bytes
(token id = byte, no special tokens). It writes plausible Python at best; its routing is
what it is for. `training.json` beside it says how it was made
(`benchmarks/train_tiny.py`) and how good it is.

A loaded model is described as a `ModelShape`: layers, widths, bytes. E routed experts,
H hidden, F expert intermediate.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from safetensors import SafetensorError

from moesim.base.errors import TraceError
from moesim.runtime.models.checkpoint import (
    DTYPES,
    first_setting,
    tensor_bytes,
    text_config,
)
from moesim.runtime.models.expert_layout import dtype_name
from moesim.runtime.models.gates import GateFacts, MoeBlock, find_blocks, gate_facts
from moesim.traces.format.schema import ModelShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn


def tiny_dir() -> Path:
    """Return the folder of the checkpoint that ships with the project."""
    return Path(__file__).parents[1] / "data" / "tiny"


BYTE_VOCABULARY: Final = 258
"""A model without a tokenizer whose vocabulary is at most 256 bytes and two specials
reads bytes.
"""

_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that is here, with its tokenizer; without one, tokens are bytes."""

    name: str
    model: nn.Module
    tokenizer: Any = None

    def encode(self, text: str | bytes) -> list[int]:
        """Turn text into token ids."""
        if self.tokenizer is None:
            return list(text.encode() if isinstance(text, str) else text)
        decoded = text if isinstance(text, str) else text.decode(errors="replace")
        return list(self.tokenizer(decoded)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn token ids into text."""
        if self.tokenizer is None:
            known = bytes(token for token in tokens if token < 256)
            return known.decode(errors="replace")
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    @property
    def device(self) -> torch.device:
        """Where tokens enter the model."""
        embeddings: Any = self.model.get_input_embeddings()
        return embeddings.weight.device


def load_model(
    spec: str | Path, *, device: str = "cpu", dtype: str = "auto"
) -> LocalModel:
    """Load ``tiny`` (the shipped model) or a local Hugging Face directory. Nothing is
    downloaded.

    Args:
        spec: ``tiny``, or a directory with `config.json` and weights.
        device: ``cpu``, ``cuda``, …
        dtype: ``auto`` keeps that of the checkpoint (``tiny`` then computes in float32,
            as CPUs like it).

    Raises:
        TraceError: no such directory, or neither a tokenizer nor a byte-sized
            vocabulary.
    """
    is_tiny = str(spec) == "tiny"
    folder = tiny_dir() if is_tiny else Path(spec)
    if not (folder / "config.json").is_file():
        raise TraceError(
            f"{folder}: expected a Hugging Face model directory with config.json, or"
            " 'tiny'; found none"
        )
    # Its weights are bfloat16, which many CPUs can only emulate.
    if is_tiny and dtype == "auto":
        dtype = "float32"
    model = load_weights(folder, dtype).eval().to(device)
    name = "tiny" if is_tiny else folder.resolve().name
    return LocalModel(name, model, load_tokenizer(folder, model))


def load_weights(folder: Path, dtype: str = "auto") -> Any:
    """Load a causal language model from its directory, without its tokenizer.

    Raises:
        TraceError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - seconds to import

    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise TraceError(
            f"{folder}: not a loadable causal language model:"
            f" {str(error).splitlines()[0]}"
        ) from error


def load_tokenizer(folder: Path, model: nn.Module) -> Any:
    """Load a directory's tokenizer; None where the model reads bytes.

    Raises:
        TraceError: there is none, and the vocabulary is larger than that of bytes.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds to import

    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # Without the check, a model of words would be fed bytes and answer nonsense.
    if text_config(model).vocab_size > BYTE_VOCABULARY:
        raise TraceError(
            f"{folder}: expected a tokenizer ({', '.join(_TOKENIZER_FILES)}) or a"
            f" byte-level vocabulary of at most {BYTE_VOCABULARY}, found neither; copy"
            " the model's tokenizer files there"
        )
    return None


_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")

# Kinds of layers that do not look back at everything.
_RECURRENT = re.compile("linear|mamba|recurrent|conv")
_WINDOWED = re.compile("sliding|chunked")


def model_shape(
    model: nn.Module,
    name: str,
    blocks: list[MoeBlock] | None = None,
    facts: GateFacts | None = None,
) -> ModelShape:
    """Describe a loaded model. Bytes are those of the loaded tensors, so they follow
    the dtype of loading.

    `dense_layers` are the decoder layers without experts; `other_bytes` is everything
    but the routed experts.

    Raises:
        TraceError: the model has no MoE layers that we know how to find.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    facts = gate_facts(model, blocks) if facts is None else facts
    config = text_config(model)
    first = blocks[0]
    hidden = int(config.hidden_size)

    with_experts = {block.layer for block in blocks}
    all_layers = range(int(config.num_hidden_layers))
    dense_layers = tuple(layer for layer in all_layers if layer not in with_experts)
    # Without dense layers the setting means the experts' width, or nothing.
    dense_width = (
        first_setting(config, ("intermediate_size",), 0) if dense_layers else 0
    )

    heads = int(first_setting(config, ("num_attention_heads",), 0))
    window, windowed = _windows(config)
    shared_width = _shared_intermediate(first.owner, hidden)
    # A block can hold a shared expert that no setting counts: it is one.
    shared_count = first_setting(config, _SHARED_COUNTS, 1) if shared_width else 0

    expert_bytes = tuple(block.expert_bytes for block in blocks)
    dtype = dtype_name(next(first.experts.parameters()).dtype)
    return ModelShape(
        name=name,
        layers=len(blocks),
        experts=first.count,
        top_k=facts.top_k,
        hidden=hidden,
        expert_intermediate=_expert_intermediate(first, hidden, config),
        expert_bytes=expert_bytes,
        other_bytes=tensor_bytes(model) - sum(expert_bytes) * first.count,
        dense_layers=dense_layers,
        shared_experts=int(shared_count),
        shared_intermediate=shared_width,
        dense_intermediate=int(dense_width),
        heads=heads,
        kv_heads=int(first_setting(config, ("num_key_value_heads",), heads)),
        head_dim=int(first_setting(config, ("head_dim",), hidden // max(heads, 1))),
        kv_values=_latent_values(config),
        window_tokens=window if windowed else 0,
        windowed_layers=windowed,
        vocab=int(config.vocab_size),
        dtype=DTYPES.get(dtype, dtype),
        scoring=facts.scoring,
        norm_topk=facts.norm_topk,
        assumed=facts.assumed,
    )


def _latent_values(config: Any) -> int:
    """Return what latent attention keeps of a token in each layer, 0 without it."""
    rank = int(first_setting(config, ("kv_lora_rank",), 0))
    return rank and rank + int(first_setting(config, ("qk_rope_head_dim",), 0))


def _windows(config: Any) -> tuple[int, int]:
    """Return the tokens that layers without full attention keep, and their number.

    Recurrent layers keep none; where there are both kinds, they count as windows.
    """
    kinds = [str(kind) for kind in first_setting(config, ("layer_types",), ())]
    recurrent = sum(bool(_RECURRENT.search(kind)) for kind in kinds)
    windowed = sum(bool(_WINDOWED.search(kind)) for kind in kinds)
    names = ("sliding_window", "attention_chunk_size")
    tokens = int(first_setting(config, names, 0)) if windowed else 0
    if windowed and not tokens:  # a window that is switched off
        windowed = 0
    return tokens, windowed + recurrent


def _shared_intermediate(owner: nn.Module, hidden: int) -> int:
    """Return the total width of a block's always-on experts, 0 if it has none."""
    for name, child in owner.named_children():
        down = getattr(child, "down_proj", None)
        # The shared expert's own gate has such a name too, but no products.
        if name.startswith("shared_") and down is not None:
            # One layer, or a stack of experts [S, H, F].
            weight = getattr(down, "weight", down)
            return int(weight.numel() // hidden)
    return 0


def _expert_intermediate(block: MoeBlock, hidden: int, config: Any) -> int:
    """Return F: as the experts module says, else from its down projection [E, H, F],
    else from the configuration.
    """
    experts = block.experts
    for name in ("intermediate_dim", "intermediate_size", "expert_dim"):
        value = getattr(experts, name, None)
        if isinstance(value, int):
            return value

    down = getattr(experts, "down_proj", None)
    if isinstance(down, torch.Tensor):
        # By count, because some models store it transposed.
        return int(down.numel() // (block.count * hidden))
    return int(first_setting(config, ("moe_intermediate_size", "intermediate_size"), 1))


# -- generate --------------------------------------------------------------------------
# Generates tokens with a plain decoding loop; an observer sees every forward pass.
#
# Prompts of one batch are aligned at their ends (left padding), so that each decode
# pass appends one token to every sequence. Each sequence draws from its own
# generator, so what is sampled does not depend on the other sequences.
#
# B sequences, S tokens of a pass per sequence (pads included), V vocabulary.


class Pass(NamedTuple):
    """One forward pass. Pads, and sequences that have ended, are not kept.

    Attributes:
        tokens: int64 [B, S] token ids that went in.
        positions: int64 [B, S] absolute position of each in its own sequence.
        keep: bool [B, S].
        logits: [B, S, V], or of the last positions only.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    keep: torch.Tensor
    logits: torch.Tensor


def generate(
    local: LocalModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    observe: Callable[[Pass], None],
    *,
    begin: Callable[[dict[str, Any]], None] = lambda _inputs: None,
    first: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
) -> None:
    """Run prefill and decode with a KV cache.

    Every generated token goes through the model too, the last one included:
    `new_tokens` new tokens are that many decode passes. A sequence ends early where
    the model says so (its end-of-sequence token is not fed).

    Args:
        local: the model.
        prompts: token ids of B prompts, none empty.
        new_tokens: >= 0.
        observe: called after every pass.
        begin: called before every pass with what the model is given.
        first: number of the first sequence, for its random draws.
        temperature: 0 decodes greedily, else tokens are drawn with `seed`.
        seed: of the draws.
    """
    draws = [_generator(seed, first + number) for number in range(len(prompts))]
    ends = _end_tokens(local.model)
    # Not every model takes positions, or can leave out logits that are not used.
    accepted = inspect.signature(local.model.forward).parameters

    tokens, mask = _padded(prompts, local.device)
    lengths = mask.sum(-1, keepdim=True)
    # Pads get position 0, which every model has; their results are not kept.
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    keep = mask.bool()
    cache = None

    for generated in range(new_tokens + 1):
        optional = {"position_ids": positions, "logits_to_keep": 1}
        inputs = {
            "input_ids": tokens,
            "attention_mask": mask,
            "past_key_values": cache,
            **{name: value for name, value in optional.items() if name in accepted},
        }
        begin(inputs)
        with torch.inference_mode():
            out = local.model(**inputs, use_cache=True)
        observe(Pass(tokens, positions, keep, out.logits))
        if generated == new_tokens:
            return

        # Ended sequences stay in the batch as rows that are masked and not kept: so the
        # KV cache needs no change.
        alive = keep[:, -1]
        chosen = _choose(out.logits[:, -1], temperature, draws)
        keep = (alive & ~torch.isin(chosen, ends.to(local.device)))[:, None]
        if not keep.any():
            return

        tokens = chosen[:, None]
        cache = out.past_key_values
        positions = lengths + generated
        mask = torch.cat([mask, keep.to(mask)], dim=1)


def _padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Align prompts at their ends: token ids and attention mask, int64 [B, S] each."""
    width = max(map(len, prompts))
    tokens = [[0] * (width - len(ids)) + list(ids) for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _choose(
    logits: torch.Tensor, temperature: float, draws: list[torch.Generator]
) -> torch.Tensor:
    """Choose the next token of every sequence, int64 [B], from logits [B, V]."""
    if temperature <= 0:
        return logits.argmax(-1)

    # Drawn on the CPU, so that every device samples the same tokens.
    chances = (logits.float() / temperature).softmax(-1).cpu()
    tokens = [
        torch.multinomial(row, 1, generator=draw)
        for row, draw in zip(chances, draws, strict=True)
    ]
    return torch.cat(tokens).to(logits.device)


def _generator(seed: int, sequence: int) -> torch.Generator:
    """Give a sequence a source of randomness of its own."""
    digest = hashlib.sha256(f"{seed}:{sequence}".encode()).digest()
    # Seven bytes, because a seed must fit into a signed 64-bit number.
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _end_tokens(model: Any) -> torch.Tensor:
    """List the tokens that end a sequence, int64."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ends is None:
        ends = model.config.get_text_config().eos_token_id

    if ends is None:
        ends = []
    elif not isinstance(ends, list):
        ends = [ends]
    return torch.tensor(ends, dtype=torch.int64)

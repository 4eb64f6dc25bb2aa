"""Describes a loaded Hugging Face model as a `ModelShape`: layers, widths, bytes.

E routed experts, H hidden, F expert intermediate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moesim.runtime.models.configuration import first_setting, text_config
from moesim.runtime.models.gates import GateFacts, gate_facts
from moesim.runtime.models.model_weights import main_dtype, tensor_bytes
from moesim.runtime.models.moe_blocks import MoeBlock, find_blocks
from moesim.traces.format.schema import ModelShape

if TYPE_CHECKING:
    from torch import nn

_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


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
    shared_width = _shared_intermediate(first.owner)
    # A block can hold a shared expert that no setting counts: it is one.
    shared_count = first_setting(config, _SHARED_COUNTS, 1) if shared_width else 0

    expert_bytes = tuple(block.expert_bytes for block in blocks)
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
        vocab=int(config.vocab_size),
        dtype=main_dtype(first.experts),
        scoring=facts.scoring,
        norm_topk=facts.norm_topk,
        assumed=facts.assumed,
    )


def _shared_intermediate(owner: nn.Module) -> int:
    """Return the total width of a block's always-on experts, 0 if it has none."""
    for name, child in owner.named_children():
        down = getattr(child, "down_proj", None)
        # The shared expert's own gate has such a name too, but no products.
        if name.startswith("shared_") and down is not None:
            return int(down.weight.shape[-1])
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

"""Tiny random models of many architectures: 3 decoder layers of a few hundred thousand
bytes each, reading bytes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from moesim.runtime.models.local_model import LocalModel
from moesim.runtime.models.moe_blocks import find_blocks

_COMMON = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
_EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}


class Kind(NamedTuple):
    """An architecture, and what its authors say its gates do."""

    config: str
    settings: dict
    scoring: str | None  # None: a rule of its own
    norm_topk: bool
    top_k: int
    gate: str = "gate"
    dense_layers: tuple[int, ...] = ()
    shared_experts: int = 0
    shared_intermediate: int = 0
    expert_parameters: int = 3 * 32 * 16


KINDS = {
    "qwen3": Kind(
        "Qwen3MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "norm_topk_prob": True,
        },
        "softmax",
        True,
        2,
    ),
    "qwen2": Kind(
        "Qwen2MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
        "softmax",
        False,
        3,
        dense_layers=(1,),
        shared_experts=1,
        shared_intermediate=24,
    ),
    "mixtral": Kind("MixtralConfig", _EIGHT, "softmax", True, 2),
    "olmoe": Kind(
        "OlmoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "intermediate_size": 16,
            "norm_topk_prob": False,
        },
        "softmax",
        False,
        4,
    ),
    "deepseek-v2": Kind(
        "DeepseekV2Config",
        _MLA
        | {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.0,
        },
        "softmax",
        False,
        3,
        dense_layers=(0,),
        shared_experts=2,
        shared_intermediate=32,
    ),
    "deepseek-v3": Kind(
        "DeepseekV3Config",
        _MLA | {"q_lora_rank": 16, "n_shared_experts": 1},
        "sigmoid",
        True,
        3,
        dense_layers=(0,),
        shared_experts=1,
        shared_intermediate=16,
    ),
    "phimoe": Kind("PhimoeConfig", _EIGHT, None, False, 2, gate="router"),
    "gpt-oss": Kind(
        "GptOssConfig",
        _EIGHT
        | {
            "head_dim": 8,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "softmax",
        True,
        2,
        gate="router",
        expert_parameters=3 * 32 * 16 + 2 * 16 + 32,
    ),
    "glm4": Kind(
        "Glm4MoeConfig",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "intermediate_size": 48,
            "head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
        },
        "sigmoid",
        True,
        2,
        dense_layers=(0,),
        shared_experts=1,
        shared_intermediate=16,
    ),
    "minimax-m2": Kind("MiniMaxM2Config", _EIGHT | {"head_dim": 8}, "sigmoid", True, 2),
}


@cache
def zoo(name: str) -> LocalModel:
    """Build a model once per test run; its gates and its head are decisive, so that
    rounding breaks no tie.

    Correction biases, where an architecture has them, are far from zero: ids are then
    not those of the largest scores.
    """
    kind = KINDS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = getattr(transformers, kind.config)(**(_COMMON | kind.settings))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for block in find_blocks(model):
            for parameter in block.gate.parameters():
                nn.init.normal_(parameter, std=0.4)
            for owner in (block.gate, block.owner):
                if isinstance(
                    bias := getattr(owner, "e_score_correction_bias", None),
                    torch.Tensor,
                ):
                    nn.init.normal_(bias, std=0.5)
        nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    return LocalModel(name, model)


def by_hand(name: str, gate: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Score hidden states [T, H] with a gate's own weights, without calling the
    gate.
    """
    with torch.no_grad():
        logits = torch.nn.functional.linear(
            hidden.float(), gate.weight, getattr(gate, "bias", None)
        )
    return logits.sigmoid() if KINDS[name].scoring == "sigmoid" else logits.softmax(-1)

"""A tiny random model of every Mixture-of-Experts family that the installed
transformers has: three decoder layers reading bytes, eight experts of which two or
three serve a token.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    model_type_to_module_name,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moesim.runtime.models.gates import find_blocks
from moesim.runtime.models.local_model import LocalModel
from moesim.runtime.models.offloaded import OffloadedModel, StoreExperts
from moesim.runtime.store.build import build_store

VOCABULARY = 256
MOST_PARAMETERS = 1 << 18
"""Of one tensor of a small model."""
LAYERS = 3

_SMALL = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 512,
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id")),
    # Attention.
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "sliding_window": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    "qk_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 64,
    # Linear attention and state spaces.
    "full_attention_interval": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "layer_group_size": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    **dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8
    ),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 8),
    "mamba_expand": 2,
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    # Experts.
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(
        ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(
        (
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        24,
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "enable_moe_block": True,
}
"""Settings by name; a configuration gets those that it has."""

_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_WIDE = {"intermediate_size": 16}
"""Where this is the width of an expert."""

_CHANGES = {
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "deepseek_v2": {
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.0,
    },
    "deepseek_v3": {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
    "dots3_note_text": {"layer_types": ["full_attention"] * LAYERS},
    "gpt_oss": _WIDE
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "kimi_linear": {"layer_types": _LINEAR},
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "full_attention"]},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 4},
    "minimax_m2": _WIDE,
    "mixtral": _WIDE,
    "olmoe": _WIDE | {"num_experts_per_tok": 4, "norm_topk_prob": False},
    "phimoe": _WIDE,
    "qwen2_moe": {
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
    "qwen3_5_moe_text": {"layer_types": _LINEAR},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_next": {"layer_types": _LINEAR},
    "qwen4_exp_text": {
        "layer_types": _LINEAR,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs beside `_SMALL`, or shows only then."""


OWN_KIND = "experts of a kind of its own, which the library's interface does not serve"
NO_TEXT = "no causal language model in the library"
AROUND_TEXT = "a model of pictures around a text model that is a family of its own"

_OWN_EXPERTS = re.compile(r"^class \w*(?:Experts|MoE|Moe)\w*\(", re.MULTILINE)


@cache
def families() -> dict[str, str | None]:
    """Every model family with routed experts, and why it cannot be run; None where it
    can be: a causal language model whose source names the library's experts interface.
    """
    folder = Path(transformers.__file__).parent / "models"
    sources = {
        place.name: "".join(path.read_text() for path in place.glob("modeling_*.py"))
        for place in folder.iterdir()
    }
    served = {name for name in sources if "use_experts_implementation" in sources[name]}
    module_of = {
        name: model_type_to_module_name(name)
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }
    found: dict[str, str | None] = dict.fromkeys(
        served - set(module_of.values()), NO_TEXT
    )
    for name, module in module_of.items():
        if module not in served:
            if _OWN_EXPERTS.search(sources.get(module, "")):
                found[name] = OWN_KIND
            continue
        text = CONFIG_MAPPING[name]().get_text_config().model_type
        found[name] = AROUND_TEXT if text != name else None
    return dict(sorted(found.items()))


def tiny_config(model_type, **changes):
    """A small configuration of a family, some of its settings changed."""
    kind = CONFIG_MAPPING[model_type]
    known = kind().to_dict()
    settings = {name: value for name, value in _SMALL.items() if name in known}
    if "kv_lora_rank" in known:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    return kind(**settings | _CHANGES.get(model_type, {}) | changes)


def random_model(config):
    """Weights large enough that a wrong expert would be seen; gates and head so
    decisive that rounding breaks no tie.

    Correction biases, where a family has them, are far from zero: ids are then not
    those of the largest scores.
    """
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    # A setting that has a new name would make a model of its real size.
    large = {
        name: tuple(parameter.shape)
        for name, parameter in outline.named_parameters()
        if parameter.numel() > MOST_PARAMETERS
    }
    assert not large, f"{config.model_type}: not small: {large}"

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
        for block in find_blocks(model):
            for parameter in block.gate.parameters():
                nn.init.normal_(parameter, std=0.4)
            for owner in (block.gate, block.owner):
                bias = getattr(owner, "e_score_correction_bias", None)
                if isinstance(bias, torch.Tensor):
                    nn.init.normal_(bias, std=0.5)
        nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    return model


@cache
def family(model_type) -> LocalModel:
    """A family's model, made once per test run."""
    return LocalModel(model_type, random_model(tiny_config(model_type)))


def make_checkpoint(model_type, directory, **changes):
    """Write a family's model; return the directory."""
    if changes:
        model = random_model(tiny_config(model_type, **changes))
    else:
        model = family(model_type).model
    model.save_pretrained(directory)
    return directory


SOME = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "phimoe", "gpt_oss",
)  # fmt: skip
"""Families that differ in gate, experts or checkpoint, for claims that need not be
shown of all.
"""


class Swapped:
    """One family: its directory, the library's model, its store, and the model with our
    experts.
    """

    def __init__(self, model_type, directory, **changes):
        folder = directory / model_type
        self.directory = make_checkpoint(model_type, folder, **changes)
        self.plain = AutoModelForCausalLM.from_pretrained(
            self.directory, experts_implementation="eager"
        ).eval()
        self.store = build_store(self.directory, directory / f"{model_type}-store")
        self.offloaded = OffloadedModel.load(self.directory)
        self.offloaded.handler = StoreExperts(self.store)


class Gate(NamedTuple):
    """What the authors of a family say its gates do, and what else it has."""

    scoring: str | None  # None: a rule of its own
    norm_topk: bool
    top_k: int
    dense_layers: tuple[int, ...] = ()
    shared_experts: int = 0
    shared_intermediate: int = 0
    expert_parameters: int = 3 * 32 * 16


GATES = {
    "qwen3_moe": Gate("softmax", norm_topk=True, top_k=2),
    "qwen2_moe": Gate("softmax", False, 3, (1,), 1, 24),
    "mixtral": Gate("softmax", norm_topk=True, top_k=2),
    "olmoe": Gate("softmax", norm_topk=False, top_k=4),
    "deepseek_v2": Gate("softmax", False, 3, (0,), 2, 32),
    "deepseek_v3": Gate("sigmoid", True, 3, (0,), 1, 16),
    "phimoe": Gate(None, norm_topk=False, top_k=2),
    "gpt_oss": Gate(
        "softmax", norm_topk=True, top_k=2, expert_parameters=3 * 32 * 16 + 2 * 16 + 32
    ),
    "glm4_moe": Gate("sigmoid", True, 2, (0,), 1, 16),
    "minimax_m2": Gate("sigmoid", norm_topk=True, top_k=2),
}


def by_hand(name: str, gate: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Score hidden states [T, H] with a gate's own weights, without calling the
    gate.
    """
    with torch.no_grad():
        logits = torch.nn.functional.linear(
            hidden.float(), gate.weight, getattr(gate, "bias", None)
        )
    return logits.sigmoid() if GATES[name].scoring == "sigmoid" else logits.softmax(-1)

"""The Mixture-of-Experts model that ships with the project: its folder, shape, loading.

Recording and running need a model whose gates were *learned*: random gates spread
tokens like dice, and every cache looks equally bad. This one has a large model's
anatomy at a thousandth of its size: a Hugging Face `Qwen3MoeForCausalLM` reading bytes
(token id = byte, no special tokens). It writes plausible Python at best; its routing is
what it is for. `training.json` beside it says how it was made
(`moesim.runtime.train.tiny`) and how good it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

BALANCE_WEIGHT: Final = 0.01
"""Of the balance term in training: enough against collapse, too weak to dictate
routing.
"""


def tiny_dir() -> Path:
    """Return the folder of the checkpoint that ships with the project."""
    return Path(__file__).parents[1] / "data" / "tiny"


def tiny_config() -> Qwen3MoeConfig:
    """Describe the model: 6 layers of 32 experts, 4 active per token, 4.5 million
    parameters.
    """
    from transformers import Qwen3MoeConfig  # noqa: PLC0415 - seconds to import

    return Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,  # of dense layers; there are none
        moe_intermediate_size=56,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE_WEIGHT,
        initializer_range=0.05,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        dtype="bfloat16",  # half the size of float32, and it ships
    )


def load_tiny(
    directory: Path | None = None, dtype: torch.dtype = torch.float32
) -> Qwen3MoeForCausalLM:
    """Load a checkpoint of `train_tiny`, the shipped one when `directory` is None,
    ready for inference.

    It computes in float32 by default: the weights are bfloat16, which many CPUs can
    only emulate.

    Raises:
        FileNotFoundError: there is none.
    """
    from transformers import Qwen3MoeForCausalLM  # noqa: PLC0415 - seconds to import

    source = tiny_dir() if directory is None else directory
    if not (source / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{source}: expected model.safetensors; make one with `moesim train-tiny`"
        )
    model = Qwen3MoeForCausalLM.from_pretrained(
        source, dtype=dtype, local_files_only=True
    )
    return model.eval()

"""Small model files with real headers: GGUF by its own writer, safetensors by hand."""

import json
from dataclasses import dataclass

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

HIDDEN = 256
INTERMEDIATE = 256
VOCABULARY = 64


@dataclass
class Sizes:
    """Bytes that a test wrote, for the reader to find again."""

    experts: list
    dense: list
    embed: int = 0
    head: int = 0
    unused: int = 0

    @property
    def file_bytes(self):
        """All tensors."""
        return sum([*self.experts, *self.dense, self.embed, self.head, self.unused])


def write_gguf(
    path,
    *,
    architecture="qwen3moe",
    layers=3,
    experts=4,
    top_k=2,
    dense_layers=0,
    shared=False,
    quant="Q4_K",
    down="Q6_K",
    head=True,
    tensors_per_part=0,
    without=(),
    **metadata,
):
    """Write a model and return its sizes by layer.

    `dense_layers` come first; `without` names metadata keys to leave out.
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_K_M)
    values = {
        "block_count": layers,
        "embedding_length": HIDDEN,
        "context_length": 4096,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "expert_count": experts,
        "expert_used_count": top_k,
        **metadata,
    }
    for key, value in values.items():
        if key not in without:
            writer.add_uint32(f"{architecture}.{key}", value)

    sizes = Sizes([0] * layers, [0] * layers)
    sizes.embed = add(writer, "token_embd.weight", (VOCABULARY, HIDDEN), "F16")
    for at in range(layers):
        name = f"blk.{at}."
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            sizes.dense[at] += add(
                writer, f"{name}{part}.weight", (HIDDEN, HIDDEN), "Q8_0"
            )
        sizes.dense[at] += add(writer, f"{name}attn_norm.weight", (HIDDEN,), "F32")
        if at < dense_layers:
            sizes.dense[at] += add(
                writer, f"{name}ffn_up.weight", (INTERMEDIATE, HIDDEN), quant
            )
            continue
        sizes.dense[at] += add(
            writer, f"{name}ffn_gate_inp.weight", (experts, HIDDEN), "F32"
        )
        if shared:
            sizes.dense[at] += add(
                writer, f"{name}ffn_up_shexp.weight", (INTERMEDIATE, HIDDEN), "Q8_0"
            )
        for part, kind in (("gate", quant), ("up", quant), ("down", down)):
            sizes.experts[at] += add(
                writer,
                f"{name}ffn_{part}_exps.weight",
                (experts, INTERMEDIATE, HIDDEN),
                kind,
            )
    if head:
        sizes.head = add(writer, "output.weight", (VOCABULARY, HIDDEN), "Q6_K")

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sizes


def add(writer, name, shape, kind):
    """Add a tensor of zeros in a weight format; return its bytes."""
    number = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[number]
    if kind == "F32":
        data = np.zeros(shape, np.float32)
        writer.add_tensor(name, data)
    elif kind == "F16":
        data = np.zeros(shape, np.float16)
        writer.add_tensor(name, data)
    else:
        row_bytes = shape[-1] // block * block_bytes
        data = np.zeros((*shape[:-1], row_bytes), np.uint8)
        writer.add_tensor(name, data, raw_dtype=number)
    return data.nbytes


def write_hf(folder, *, layers=2, experts=4, **config):
    """Write the config.json of a Hugging Face model."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "vocab_size": VOCABULARY,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder

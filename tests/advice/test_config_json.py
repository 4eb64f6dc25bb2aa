"""Models from `config.json` alone, as their makers publish them: weights, experts, keys
and values; kinds and keys that are not known.
"""

import json

import pytest
import torch
import transformers
from support.model_files import write_gguf, write_hf

from moesim.advice.answer import model_answer
from moesim.advice.model.catalogue import model_contents
from moesim.base.errors import AdviceError

# Folder -> weights in billions as transformers 5.23.0 builds them (Qwen3.8, LongCat and
# Qwen3-VL: as published, tables included), active ones with the head, bytes of one
# expert, layers that keep every token, MiB of keys and values per 1,024 tokens where a
# window of 128 is full, as one token reads them.
FOLDERS = {
    "DeepSeek-V3.2": (671.878, 37.48, 3 * 7168 * 2048, 61, 83.88),
    "DeepSeek-V4-Flash": (284.332, 13.27, 13_369_344, 0, 12.09),
    "GLM-5": (743.911, 40.83, 2 * 3 * 6144 * 2048, 78, 107.25),
    "Kimi-K2.5": (1026.408, 31.69, 3 * 7168 * 2048 * 18 // 32, 61, 68.62),
    "LFM2-8B-A1B": (8.340, 1.56, 2 * 3 * 2048 * 1792, 6, 12.0),
    "Llama-4-Scout-17B-16E-Instruct": (107.770, 16.14, 2 * 3 * 5120 * 8192, 12, 192.0),
    "LongCat-Flash-Lite": (68.5, 3.98, 2 * 3 * 3072 * 1024, 14, 31.5),
    "MiMo-V2-Flash": (308.779, 14.82, 3 * 4096 * 2048, 9, 46.88),
    "MiniMax-M2.7": (228.690, 10.42, 3 * 3072 * 1536, 62, 248.0),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.578, 3.23, 2 * 2 * 2688 * 1856, 6, 6.0),
    "NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (120.669, 12.23, 2 * 1024 * 2688, 8, 8.0),
    "Qwen3-VL-30B-A3B-Instruct": (30.5, 3.04, 2 * 3 * 2048 * 768, 48, 96.0),
    "Qwen3.5-35B-A3B": (34.661, 2.95, 2 * 3 * 2048 * 512, 10, 20.0),
    "Qwen3.6-35B-A3B-NVFP4": (34.661, 2.95, 3 * 2048 * 512 * 9 // 16, 10, 20.0),
    "Qwen3.8-Flash-Next": (176.944, 6.63, 2 * 3 * 2560 * 640, 12, 27.0),
    "Trinity-Nano-Preview": (6.120, 0.82, 2 * 3 * 1024 * 256, 14, 56.0),
    "gemma-4-26B-A4B": (25.233, 3.82, 2 * 3 * 2816 * 704, 5, 220.0),
    "gpt-oss-120b": (116.829, 5.13, 13_219_200, 18, 40.5),
}


@pytest.fixture(scope="module")
def configs(pytestconfig):
    folder = pytestconfig.rootpath.parent / "shared" / "field" / "configs"
    if not folder.is_dir():
        pytest.skip(f"other people's files, no part of the project: no {folder}")
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_a_config_alone_says_weights_experts_and_what_is_kept(configs, name):
    total, active, expert_bytes, full_layers, kept = FOLDERS[name]
    model = model_contents(str(configs / name))
    assert model.weights / 1e9 == pytest.approx(total, rel=0.002)
    assert model.active_weights / 1e9 == pytest.approx(active, rel=0.01)
    routed = model.layers[model.moe_layers[0]]
    assert routed.expert_bytes == expert_bytes * routed.experts
    full = [
        each
        for each in model.layers
        if each.kv_bytes_per_token and not each.window_tokens
    ]
    assert len(full) == full_layers
    assert model.kv_bytes(1024) / 2**20 == pytest.approx(kept, rel=0.001)
    # Nothing in these files may change a figure and be skipped.
    assert not [remark for remark in model.assumed if "does not know" in remark]


@pytest.mark.parametrize(
    ("tokens", "gigabytes"), [(4096, 0.40), (8192, 0.48), (32768, 0.99), (131072, 3.00)]
)
def test_windows_of_gemma_have_heads_of_their_own(configs, tokens, gigabytes):
    model = model_contents(str(configs / "gemma-4-26B-A4B"))
    kept = model.kv_cache_bytes(tokens, 512).sum()
    assert kept / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_compressed_attention_keeps_one_entry_for_several_tokens(configs):
    """DeepSeek-V4: 512 values a token in windows of 128 in 43 layers; beyond them 512
    and an index of 128 for 4 tokens in 21 layers, 512 for 128 tokens in 20.
    """
    model = model_contents(str(configs / "DeepSeek-V4-Flash"))
    window = 43 * 128 * 512 * 2
    for tokens in (1024, 100_000):
        pooled = tokens * 2 * (21 * (512 + 128) / 4 + 20 * 512 / 128)
        assert model.kv_bytes(tokens) == pytest.approx(window + pooled)
    # What llama.cpp holds (`llama_kv_cache_dsv4`), and prints for 131,072 tokens in
    # micro-batches of 512: windows of 768 cells, entries of 4 and of 128 tokens and the
    # indexer's (ggml-org/llama.cpp#25468); tokens that wait (#27680).
    kept = model.kv_cache_bytes(131_072, 512).sum()
    assert kept / 2**20 == pytest.approx(32.25 + 672 + 20 + 168)
    waiting = sum(layer.waiting_bytes for layer in model.layers)
    assert waiting / 2**20 == pytest.approx(1.31 + 10.00 + 0.33, abs=0.01)
    # 6.7 MiB for 1,024 tokens more; at 1,024 most is room of windows and padding. The
    # 33 MiB that the field's table has are printed of Qwen3.8-Flash-Next (below).
    kept = model_answer(model).data["kv_bytes_1024_tokens"]
    assert kept / 2**20 == pytest.approx(32.25 + 5.25 + 5.0 + 1.3125)
    in_all = model.expert_bytes / 2**30
    assert in_all == pytest.approx(137, rel=0.001)


def test_an_indexers_keys_are_kept_beside_keys_and_values(configs):
    """Qwen3.8-Flash-Next: 24 MiB of 12 layers' attention and 3 of their indexers for
    1,024 tokens. Builds of llama.cpp from August 26 to September 3 kept 33: they held
    values for the indexers that nothing read (ggml-org/llama.cpp#28296, #28330).
    """
    model = model_contents(str(configs / "Qwen3.8-Flash-Next"))
    assert model.kv_bytes(1024) / 2**20 == pytest.approx(24 + 3)
    unread_values = 12 * 1024 * 256 * 2
    assert (model.kv_bytes(1024) + unread_values) / 2**20 == pytest.approx(33)


def test_choices_that_read_nothing_are_not_read(configs):
    """LongCat: 12 of 256 experts and 128 that do nothing are 8 experts on average."""
    layer = model_contents(str(configs / "LongCat-Flash-Lite")).layers[0]
    assert layer.active_bytes == pytest.approx(8 * layer.expert_bytes / 256)


@pytest.mark.parametrize(
    "family",
    [
        "mixtral", "qwen3_moe", "glm4_moe_lite", "ernie4_5_moe", "exaone_moe", "jamba",
        "minimax", "granitemoehybrid", "kimi_linear", "nemotron_h", "qwen3_next",
    ],
)  # fmt: skip
def test_weights_are_those_that_transformers_builds(tmp_path, family):
    """By the defaults of other families than those above."""
    config = transformers.AutoConfig.for_model(family).get_text_config()
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict(), default=str))
    expected = sum(parameter.numel() for parameter in built.parameters())
    assert model_contents(str(tmp_path)).weights == pytest.approx(expected, rel=0.001)


RANKS = {"q_lora_rank": 8, "o_lora_rank": 8, "sliding_window": 8, "index_head_dim": 8}


def folder(tmp_path, **changes):
    """A config alone."""
    sizes = {"vocab_size": 64, "moe_intermediate_size": 256}
    return write_hf(tmp_path / "hf", **{**sizes, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["full_attention", "quantum_attention"]},
            "'quantum_attention'",
        ),
        ({"hybrid_override_pattern": "MQ"}, "unknown kind of layer 'Q'"),
        ({"hybrid_layer_pattern": [0, 7]}, "unknown kind of layer 7"),
        ({"mlp_layer_types": ["sparse", "spars"]}, "'spars' .did you mean 'sparse'"),
        ({"layer_types": ["full_attention"]}, "a kind for each of 2 layers, found 1"),
        ({"layer_types": "full_attention"}, "layer_types: expected a list"),
        ({"layer_types": ["linear_attention"] * 2}, "expected one of mamba_num_heads"),
        ({"vocab_size": None}, "expected one of vocab_size, found none"),
        ({"num_experts_per_tok": None}, "expected one of num_experts_per_tok"),
        ({"num_experts": 70_000}, "experts: expected up to 65,536"),
        ({"num_experts": 0}, "no routed experts"),
        ({"moe_intermediate_size": -1}, "expected a whole number, found -1"),
        ({"quantization_config": {"quant_method": "x1"}}, "unknown quant_method 'x1'"),
        ({"compress_ratios": [4, "x"], "o_groups": 1, **RANKS}, "compress_ratios: exp"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(AdviceError, match=message) as caught:
        model_contents(str(folder(tmp_path, **changes)))
    assert "\n" not in str(caught.value)


def test_a_key_that_is_not_known_is_named(tmp_path):
    changes = {
        "warp_size": 7,
        "rope_theta": 5,
        "fold_count": 0,
        "text_config": {"zz": 1},
    }
    (_, remark) = model_contents(str(folder(tmp_path, **changes))).assumed
    assert remark.endswith("may change its figures: warp_size, zz")


def test_a_language_part_may_be_nested(tmp_path):
    plain = model_contents(str(folder(tmp_path / "plain")))
    config = json.loads((tmp_path / "plain" / "hf" / "config.json").read_text())
    inner = folder(tmp_path / "nested")
    outer = {"model_type": "x", "text_config": config, "vision_config": {"depth": 3}}
    (inner / "config.json").write_text(json.dumps(outer))
    nested = model_contents(str(inner))
    assert nested.layers == plain.layers
    assert "vision_config: not counted" in nested.assumed[1]


def test_a_label_says_what_a_config_without_weights_will_be(tmp_path):
    path = folder(tmp_path)
    by_format = {
        label: model_contents(str(path), label).expert_bytes
        for label in ("bf16", "Q8_0", "mxfp4")
    }
    weights = 2 * 4 * 3 * 256 * 256
    assert by_format["bf16"] == 2 * weights
    assert by_format["Q8_0"] == weights * 34 / 32
    assert by_format["mxfp4"] == weights * 17 / 32
    with pytest.raises(AdviceError, match="quantisation 'nine'"):
        model_contents(str(path), "nine")


def test_windowed_layers_of_a_gguf_file_may_have_heads_of_their_own(tmp_path):
    """`key_length_swa`, and every third layer with full attention."""
    path = tmp_path / "m.gguf"
    write_gguf(
        path,
        architecture="gemma4",
        **{
            "attention.sliding_window": 1024,
            "attention.sliding_window_pattern": 3,
            "attention.key_length": 512,
            "attention.value_length": 512,
            "attention.key_length_swa": 256,
            "attention.value_length_swa": 256,
        },
    )
    layers = model_contents(str(path)).layers
    assert [each.window_tokens for each in layers] == [1024, 1024, 0]
    assert [each.kv_bytes_per_token for each in layers] == [2048, 2048, 4096]
